"""How long an emergency save will take, and whether the cloud's notice leaves time for it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.events.event import JobEvent
from spotguard.runtime.preemption.notices import promised_grace_s
from spotguard.runtime.process import clock
from spotguard.runtime.state.tracked import TrackedModule
from spotguard.shared.units import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spotguard.runtime.checkpoint.captured import Saved
    from spotguard.runtime.process.settings import Settings
    from spotguard.runtime.reporting.node_reports import Reporter
    from spotguard.runtime.state.tracked import Tracked

log = logging.getLogger("spotguard")

MARGIN_S = 1.0
"""Seconds kept free beside every estimate."""
_GUESSED_RATE_BYTES_PER_S = 100e6


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Does an emergency save fit the notice that this place gives?"""

    emergency_s: float
    grace_s: float
    message: str
    """One sentence for the log and the history, with what to do if it does not."""

    @property
    def fits(self) -> bool:
        """Return True if there is time enough."""
        return self.emergency_s <= self.grace_s


def emergency_s(last: Saved | None, objects: Iterable[Tracked]) -> float:
    """Return the expected seconds of an emergency save: as measured, or guessed before any."""
    if last is not None:
        return last.duration_s
    size_bytes = sum(
        parameter.numel() * parameter.element_size()
        for item in objects
        if isinstance(item, TrackedModule)
        for parameter in item.bare.parameters()
        if parameter.requires_grad or not item.skips_frozen
    )
    return 3 * size_bytes / _GUESSED_RATE_BYTES_PER_S  # weights and two moments


def fit(saved: Saved, metadata: str, sigterm_grace_s: float) -> Fit:
    """Compare what a save took with the notice of the cloud (`SPOTGUARD_METADATA`)."""
    grace_s = promised_grace_s(metadata) or sigterm_grace_s
    need_s = 1.2 * saved.duration_s + MARGIN_S
    words = (
        f"an emergency save of {format_bytes(saved.size_bytes)} takes about "
        f"{format_duration(need_s)}; the notice here is {format_duration(grace_s)}"
    )
    verdict = "it fits" if need_s <= grace_s else "too long: save more often, only those count"
    return Fit(emergency_s=need_s, grace_s=grace_s, message=f"{words}: {verdict}")


def tell_saved(saved: Saved, train_s: float, reporter: Reporter) -> None:
    """After each save: what it is, and how much training is in it."""
    reporter.event(JobEvent.SAVED, step=saved.step, **saved.facts, train_s=train_s)
    log.info("%s", saved.words)
    if saved.not_finite:
        log.warning("%s", saved.not_finite)
        reporter.event(JobEvent.WARNING, message=saved.not_finite)


def tell_fit(saved: Saved, settings: Settings, reporter: Reporter) -> None:
    """After the first save, when the rate is known: would an emergency save be in time?"""
    found = fit(saved, settings.metadata, settings.grace_s)
    log.log(logging.INFO if found.fits else logging.WARNING, "%s", found.message)
    reporter.event(
        JobEvent.FITS if found.fits else JobEvent.WARNING,
        emergency_s=found.emergency_s,
        grace_s=found.grace_s,
        fits=found.fits,
        message=found.message,
    )


def last_save_s(deadline_at: float | None) -> float:
    """Return the seconds that an emergency save may take from now on."""
    return 60.0 if deadline_at is None else max(deadline_at - clock.now() - 0.2, 0.5)
