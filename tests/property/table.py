"""What came of all draws, as tables."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.property.child.moments import MOMENTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.property.runner import Result


def tables(results: Sequence[Result], seconds: float) -> list[str]:
    """Return the lines that tell of it."""
    wrong = [result for result in results if result.wrong]
    promises = Counter(result.promise for result in results if result.promise)
    late = sum(result.too_late for result in results)
    idle = sum(not (result.disturbed or result.wrong or _refused(result)) for result in results)
    share = 100 * late / max(1, late + len(results))
    kinds = [kind for result in results for kind in result.kinds]
    rate = 60 * len(results) / max(seconds, 1e-9)
    return [
        f"{len(results)} draws in {seconds:.0f} s ({rate:.1f} a minute), {len(kinds)} blows: "
        f"{len(wrong)} wrong ends",
        "compared: " + _listed(promises),
        f"drawn anew, as nothing was disturbed: {late} ({share:.0f} %); "
        f"undisturbed to the last: {idle}",
        "",
        *_by_blow_and_world(kinds),
        "",
        *_by_moment(kinds),
        "",
        "attempts ended as: " + _listed(sum((r.ends for r in results), Counter[str]())),
        "",
        *_by_script(results),
    ]


def _refused(result: Result) -> bool:
    return bool(result.ends["refused"])


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def _by_blow_and_world(kinds: Sequence[tuple[str, str, int]]) -> list[str]:
    counts = Counter((kind, world) for kind, _, world in kinds)
    lines = [f"{'blow':<16}" + "".join(f"{f'{n} ranks':>9}" for n in (1, 2, 3, 4))]
    return lines + [
        f"{kind:<16}" + "".join(f"{counts[kind, n] or '':>9}" for n in (1, 2, 3, 4))
        for kind in sorted({kind for kind, _, _ in kinds})
    ]


def _by_moment(kinds: Sequence[tuple[str, str, int]]) -> list[str]:
    counts = Counter(moment for _, moment, _ in kinds)
    return [
        "at: " + ", ".join(f"{moment} {counts[moment]}" for moment in MOMENTS if counts[moment])
    ]


def _by_script(results: Sequence[Result]) -> list[str]:
    draws = Counter(result.draw.script for result in results)
    wrong = Counter(result.draw.script for result in results if result.wrong)
    blows = Counter(result.draw.script for result in results for _ in result.kinds)
    lines = [f"{'script':<34}{'draws':>6}{'blows':>6}{'wrong':>6}"]
    return lines + [
        f"{name:<34}{draws[name]:>6}{blows[name]:>6}{wrong[name] or '':>6}"
        for name in sorted(draws)
    ]
