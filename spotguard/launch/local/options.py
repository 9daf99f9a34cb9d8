"""What the local cloud is asked to be: its protocol, its prices, its interruptions."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from spotguard.errors import SpecError
from spotguard.launch.local.interruptions import Interruption, parse_interruptions
from spotguard.shared.paths import expanded
from spotguard.shared.spot_traces import Trace, read_trace

if TYPE_CHECKING:
    from collections.abc import Mapping

METADATA: Final = ("aws", "gcp", "azure", "none")
RUNNERS: Final = ("torchrun", "python")
DEFAULT_SPOT_USD_PER_H = 0.918
"""AWS p3.2xlarge spot, us-east-2, February 2023: the median of the recorded traces."""
DEFAULT_ON_DEMAND_USD_PER_H = 3.06
"""The same machine on demand."""


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """A cloud made of this machine's processes. `check` tells whether it can exist."""

    metadata: str = "aws"
    """Whose protocol and grace times: aws, gcp or azure; with none, a notice is a file."""
    interruptions: tuple[str, ...] = ()
    """Scripted ones, in the language of `spotguard.launch.local.interruptions`."""
    mtbf_s: float | None = None
    """Mean seconds between random interruptions of spot nodes; None for no random ones."""
    seed: int | None = None
    """Seed of the random interruptions; None draws one, which the run then keeps."""
    trace: str | None = None
    """Path of a recorded trace whose capacity and prices are replayed."""
    speed_up: float = 1.0
    """How many times faster than in reality the trace runs and grace times pass."""
    price_usd_per_h: float | None = None
    """Of one spot node; None takes the trace's, else `DEFAULT_SPOT_USD_PER_H`."""
    on_demand_usd_per_h: float | None = None
    """Of one on-demand node; None takes the trace's, else `DEFAULT_ON_DEMAND_USD_PER_H`."""
    runner: str = "torchrun"
    """What starts the script on a node: ranks as `torchrun` starts them, or plain `python`."""

    def check(self) -> None:
        """Return if such a cloud can exist.

        Raises:
            SpecError: names the first field that makes no sense.
        """
        _require_one_of("metadata", self.metadata, METADATA)
        _require_one_of("runner", self.runner, RUNNERS)
        _require_above_zero("speed_up", self.speed_up)
        for name, value in (
            ("mtbf", self.mtbf_s),
            ("price", self.price_usd_per_h),
            ("on_demand_price", self.on_demand_usd_per_h),
        ):
            if value is not None:
                _require_above_zero(name, value)
        self.script()
        self.read_trace()

    def script(self) -> tuple[Interruption, ...]:
        """Return the scripted interruptions; SpecError if they are not of the language."""
        return parse_interruptions(self.interruptions)

    def read_trace(self) -> Trace | None:
        """Return the trace, if there is one; SpecError if its file is none."""
        return None if self.trace is None else read_trace(expanded(self.trace))

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> LocalOptions:
        """Return the options that `to_json` wrote."""
        return cls(**{**body, "interruptions": tuple(body["interruptions"])})


def _require_one_of(field: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise SpecError(field, f"{given!r} is not one of {', '.join(allowed)}")


def _require_above_zero(field: str, given: float) -> None:
    if not (math.isfinite(given) and 0 < given <= sys.maxsize):
        raise SpecError(field, f"must be a number above 0, not {given!r}")
