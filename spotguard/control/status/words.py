"""A run in words, for the terminal and for pages; what is unknown says so and is never zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.shared.units import format_duration, format_usd

if TYPE_CHECKING:
    from spotguard.control.status.view import AttemptView, RunView
    from spotguard.policy.plan.job import Candidate

DASH = "–"  # noqa: RUF001 - a dash in a table cell, not a minus
DEMO = "demo prices: local nodes cost nothing, their price is played"


def energy(kwh: float | None) -> str:
    """Return `1.25 kWh`, or Wh below a tenth of that; `unknown` for None."""
    if kwh is None:
        return "unknown"
    return f"{kwh:,.2f} kWh" if kwh >= 0.1 else f"{kwh * 1000:.3g} Wh"


def co2e(kg: float | None) -> str:
    """Return `0.52 kg CO2e`, or grams below a tenth of that; `unknown` for None."""
    if kg is None:
        return "unknown"
    return f"{kg:,.2f} kg CO2e" if kg >= 0.1 else f"{kg * 1000:.3g} g CO2e"


def seconds(value: float | None) -> str:
    """Return a duration for a table cell; a dash for None."""
    return DASH if value is None else format_duration(value)


def place(where: AttemptView | Candidate) -> str:
    """Return where an attempt ran or would: `local us-east-2a`."""
    zone = where.zone or ""
    region = where.region or ""
    nearest = zone if zone and zone.startswith(region) else f"{region} {zone}".strip()
    return f"{where.infra} {nearest}".strip()


def cluster(attempt: AttemptView) -> str:
    """Return where an attempt ran, and whether on what was left of the cluster before."""
    return f"{place(attempt)}, in place" if attempt.in_place else place(attempt)


def machines(attempt: AttemptView) -> str:
    """Return what an attempt is made of: `2 nodes (p3.2xlarge), spot at $0.92/h each`."""
    nodes = f"{attempt.nodes} {'node' if attempt.nodes == 1 else 'nodes'}"
    kind = f" ({attempt.instance_type})" if attempt.instance_type else ""
    market = attempt.market.replace("_", "-")
    return f"{nodes}{kind}, {market} at {rate(attempt.price_usd_per_h)} each"


def rate(usd_per_h: float | None) -> str:
    """Return `$0.92/h`; `unknown` for None."""
    return "unknown" if usd_per_h is None else f"{format_usd(usd_per_h)}/h"


def steps_span(attempt: AttemptView) -> str:
    """Return `40→80`; an unknown end is a dash."""
    return f"{_number(attempt.first_step)}→{_number(attempt.last_step)}"


def why(attempt: AttemptView) -> tuple[str, str]:
    """Return why an attempt ended, in words, and the colour; a living one is `running`."""
    if attempt.end_reason is None:
        if attempt.ended_at is None:
            return "running", "green"
        return "unknown", "default"
    reason = attempt.end_reason
    return reason.told(attempt.saved, by_sweep=attempt.by_sweep), reason.colour


def saved_money(saved_pct: float | None) -> str:
    """Return `71 % saved`, or how much more it cost; `saving unknown` for None."""
    if saved_pct is None:
        return "saving unknown"
    if saved_pct < 0:
        return f"{-saved_pct:.0f} % more than on demand"
    return f"{saved_pct:.0f} % saved"


def steps_done(view: RunView) -> str:
    """Return `412 of 600 steps`, with what is known."""
    if view.step is None:
        return "no step seen yet" if not view.state.settled else "no step finished"
    if view.total_steps is None:
        return f"{view.step} steps"
    return f"{view.step} of {view.total_steps} steps"


def pace(view: RunView) -> str:
    """Return `3.1 steps/s · 1 min 02 s left · loss 2.414`, as far as known; else a dash."""
    parts = []
    if view.step_s is not None and view.step_s > 0:
        slow = view.step_s > 1
        parts.append(f"{view.step_s:.1f} s/step" if slow else f"{1 / view.step_s:.1f} steps/s")
    if view.eta_s is not None:
        parts.append(f"{format_duration(view.eta_s)} left")
    if view.loss is not None:
        parts.append(f"loss {view.loss:.4g}")
    return " · ".join(parts) or DASH


def last_save(view: RunView, now: float) -> str:
    """Return `step 400, 3.0 s ago`."""
    if view.saved_step is None:
        return "nothing yet"
    if view.saved_at is None:
        return f"step {view.saved_step}"
    return f"step {view.saved_step}, {format_duration(max(0.0, now - view.saved_at))} ago"


def fraction(part: float | None, whole: float | None) -> float | None:
    """Return part/whole within 0..1; None when either is unknown."""
    if part is None or whole is None or whole <= 0:
        return None
    return min(1.0, max(0.0, part / whole))


def percent(share: float) -> str:
    """Return `83 %`; what is not quite nothing or all is not rounded to it."""
    if 0 < share < 0.01:
        return "< 1 %"
    if 0.99 < share < 1:
        return "99 %"
    return f"{100 * share:.0f} %"


def _number(step: int | None) -> str:
    return DASH if step is None else str(step)
