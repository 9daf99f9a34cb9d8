"""What a smoke measured, and whether an emergency save would fit the cloud's notice. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from spotguard.shared.json_documents import INSTANT

NOTICES_S: Final = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""From a cloud's word that a node will be taken to its end; others promise nothing."""
_MARGIN, _MARGIN_S = 1.2, 1.0
"""As a job keeps for itself beside what it has measured."""


@dataclass(frozen=True, kw_only=True)
class Smoke:
    """What a smoke that passed has measured, on this machine's CPU."""

    state_bytes: int
    """Of one save, of all ranks together."""
    save_s: float
    """What its save took, to a folder of this machine."""
    step_s: float | None
    """Mean of its steps, each of few samples."""
    step_samples: int | None
    """Of one of these steps; None: as many as the script says."""
    first_step_s: float | None
    """From the start of Python to the end of the first step: imports, set-up, a step."""
    at: float = field(metadata=INSTANT)
    """When it ran; what passed is not tried again."""
    emergency_s: float | None = None
    """What an emergency save would take on the fewest nodes that the job may have: an estimate."""
    notice_s: float | None = None
    """The shortest notice of the clouds that may be asked; None: they promise none."""

    @property
    def fits(self) -> bool:
        """True unless an emergency save is known to take longer than the notice."""
        if self.emergency_s is None or self.notice_s is None:
            return True
        return self.emergency_s <= self.notice_s


def emergency_s(state_bytes: int, *, nodes: int, bytes_per_s: float) -> float:
    """Return the seconds of an emergency save: ranks write disjoint parts of the state at once.

    Args:
        state_bytes: of all ranks together.
        nodes: how many write.
        bytes_per_s: of one node into the store.
    """
    return _MARGIN * state_bytes / (nodes * bytes_per_s) + _MARGIN_S


def notice_s(infra: str) -> float | None:
    """Return the shortest notice of these places (`gcp,aws/us-east-1`); None if any has none."""
    clouds = {place.partition("/")[0] for place in infra.split(",")}
    known = [NOTICES_S[cloud] for cloud in clouds if cloud in NOTICES_S]
    return min(known) if len(known) == len(clouds) else None
