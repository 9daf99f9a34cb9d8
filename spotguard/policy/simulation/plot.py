"""The simulation as a picture: cost and finishing time of each policy, and where its runs were."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spotguard.policy.simulation.report import Simulation, Spread

_WIDTH, _LEFT, _ROW = 720, 130, 64
_COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#aa3377", "#994455", "#004488", "#99ddff")
_ON_DEMAND, _NOTHING, _LINE = "#ee6677", "#dddddd", "#888888"


def svg(simulation: Simulation) -> str:
    """Return an SVG document: a bar from 10 % to 90 % with the median, and the strip of places."""
    rows = simulation.policies
    most = max([simulation.on_demand_usd, *(row.cost_usd.p90 for row in rows)]) * 1.05
    height = 70 + _ROW * len(rows) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="10" y="20">{escape(_title(simulation))}</text>',
        f'<text x="10" y="38" fill="{_LINE}">cost in USD, 10-90 % and median; below it the run of '
        "median cost over time</text>",
    ]
    for index, row in enumerate(rows):
        top = 56 + index * _ROW
        parts.append(f'<text x="10" y="{top + 15}">{escape(row.policy)}</text>')
        parts += _bar(row.cost_usd, top, most)
        parts += _strip(row.strip, top + 26)
    x = _x(simulation.on_demand_usd, most)
    bottom = 56 + _ROW * len(rows)
    parts.append(f'<line x1="{x}" y1="50" x2="{x}" y2="{bottom}" stroke="{_ON_DEMAND}"/>')
    parts.append(
        f'<text x="{x - 4}" y="{bottom + 14}" text-anchor="end" fill="{_ON_DEMAND}">on demand '
        f"{simulation.on_demand_usd:.2f}</text>"
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _title(simulation: Simulation) -> str:
    hours, deadline = simulation.work_s / 3600, simulation.deadline_s / 3600
    return (
        f"{hours:g} h of work by {deadline:g} h on {simulation.gang} x {simulation.market}, "
        f"{simulation.runs} runs"
    )


def _x(usd: float, most: float) -> float:
    return round(_LEFT + (_WIDTH - _LEFT - 20) * usd / most, 1)


def _bar(cost: Spread, top: int, most: float) -> list[str]:
    low, middle, high = (_x(each, most) for each in (cost.p10, cost.median, cost.p90))
    return [
        f'<rect x="{low}" y="{top + 4}" width="{max(1.0, round(high - low, 1))}" height="14" '
        'fill="#bbccee"/>',
        f'<line x1="{middle}" y1="{top + 2}" x2="{middle}" y2="{top + 20}" stroke="#000000" '
        'stroke-width="2"/>',
        f'<text x="{min(high + 6, _WIDTH - 60)}" y="{top + 16}">{cost.median:.2f}</text>',
    ]


def _strip(strip: str, top: int) -> list[str]:
    width = (_WIDTH - _LEFT - 20) / max(1, len(strip))
    return [
        f'<rect x="{_LEFT + index * width:.1f}" y="{top}" width="{width:.1f}" height="10" '
        f'fill="{_colour(sign)}"/>'
        for index, sign in enumerate(strip)
    ]


def _colour(sign: str) -> str:
    if sign == "$":
        return _ON_DEMAND
    return _NOTHING if sign == "." else _COLOURS[(ord(sign) - ord("a")) % len(_COLOURS)]
