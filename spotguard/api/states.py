"""What runs, attempts, checkpoints and markets can be; and how many steps a profile has at most."""

from __future__ import annotations

from spotguard.events.profile import MOST_STEPS
from spotguard.events.states import CheckpointKind, EndReason, Market, RunState

__all__ = ["CheckpointKind", "EndReason", "Market", "MOST_STEPS", "RunState"]
