"""Makes a wrong draw smaller: fewer lives, fewer ranks, no fault, a shorter script."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.property.scripts import corpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.property.draw import Draw, Life

MOST_TRIES = 40
TRIES_EACH = 2
"""A signal lands a little elsewhere each time: what ends well once may go wrong at a second try."""


def shrunk(draw: Draw, goes_wrong: Callable[[Draw], bool]) -> Draw:
    """Return the smallest draw found that still goes wrong."""
    tries = 0
    found = True
    while found and tries < MOST_TRIES:
        found = False
        for smaller in _smaller(draw):
            tries += 1
            if any(goes_wrong(smaller) for _ in range(TRIES_EACH)):
                draw, found = smaller, True
                break
            if tries >= MOST_TRIES:
                break
    return draw


def _smaller(draw: Draw) -> Iterator[Draw]:
    lives = draw.lives
    for out in range(len(lives) - 1):
        if len(lives) > 1:
            yield replace(draw, lives=lives[:out] + lives[out + 1 :])
    if draw.bucket and not any(life.fault for life in lives):
        yield replace(draw, bucket=False)
    if any(life.fault for life in lives):
        yield replace(draw, lives=tuple(replace(li, fault="", fault_at="") for li in lives))
    if draw.leave_at:
        yield replace(draw, leave_at=0.0)
    script = corpus()[draw.script]
    for world in script.worlds:
        if world < max(life.world for life in lives):
            yield replace(draw, lives=tuple(_on(life, min(life.world, world)) for life in lives))
    if draw.save != "100_steps":
        yield replace(draw, save="100_steps")
    for simpler in ("term-all", "kill-all"):
        if any(life.kind not in ("", "term-all", "kill-all") for life in lives):
            yield replace(
                draw, lives=tuple(replace(li, kind=simpler) if li.kind else li for li in lives)
            )
    worlds = {life.world for life in lives}
    others = [s for s in corpus().values() if s.lines < script.lines and not s.refused]
    for other in sorted(others, key=lambda s: s.lines)[:5]:
        if worlds <= set(other.worlds) and other.elastic == script.elastic:
            yield replace(draw, script=other.name)


def _on(life: Life, world: int) -> Life:
    return replace(life, world=world, victim=min(life.victim, world - 1))
