"""Windows of recorded markets: each is one job on one stretch of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from spotguard.policy.market.recorded import RecordedZone


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Jobs of one shape on several stretches of one market. Times in ticks."""

    up: NDArray[np.bool_]
    """(windows, ticks, zones): whether the gang can be had."""
    price: NDArray[np.float64]
    """(windows, ticks, zones) USD per node and hour."""
    on_demand: float
    """USD per node and hour of the cheapest on-demand place."""
    work: float
    deadline: float
    start: float
    """What a start takes without progress."""
    tick_s: float
    gang: int
    accelerator: str
    names: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many windows."""
        return len(self.up)


def cut(
    zones: Sequence[RecordedZone],
    *,
    gang: int,
    work_h: float,
    deadline_h: float,
    start_s: float,
    begins: Sequence[int],
) -> Windows:
    """Return the windows that begin at these ticks.

    Raises:
        ValueError: a window would reach beyond the record.
    """
    tick_s = zones[0].gap_s
    ticks = int(np.ceil(deadline_h * 3600 / tick_s))
    length = min(len(zone.capacity) for zone in zones)
    if max(begins) + ticks > length:
        raise ValueError("a window reaches beyond the record")
    index = np.array(begins)[:, None] + np.arange(ticks)
    return Windows(
        up=np.stack([zone.capacity[index] >= gang for zone in zones], axis=2),
        price=np.stack([zone.spot_usd_per_h[index] for zone in zones], axis=2),
        on_demand=min(zone.on_demand_usd_per_h for zone in zones),
        work=work_h * 3600 / tick_s,
        deadline=deadline_h * 3600 / tick_s,
        start=start_s / tick_s,
        tick_s=tick_s,
        gang=gang,
        accelerator=zones[0].accelerator,
        names=tuple(zone.zone for zone in zones),
    )
