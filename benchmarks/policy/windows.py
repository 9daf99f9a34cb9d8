"""The windows that all tables of this benchmark are made on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from spotguard.policy.market.recorded import recorded
from spotguard.policy.simulation.windows import cut

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spotguard.policy.simulation.windows import Windows

V100, V100X4, H100 = "aws_v100_2023-02", "aws_v100x4_2023-08", "gcp_h100x16_2025-10"


class Case(NamedTuple):
    """A market and a gang; `zones` empty is all of them."""

    dataset: str
    gang: int
    zones: tuple[int, ...] = ()


MULTI = {
    "V100x1": Case(V100, 1),
    "V100x2": Case(V100X4, 2),
    "V100x4": Case(V100X4, 4),
    "H100x1": Case(H100, 1),
    "H100x8": Case(H100, 8),
    "H100x16": Case(H100, 16),
}
ONE_ZONE = {
    f"{market} {zone.zone}": Case(dataset, gang, (index,))
    for market, dataset, gang in (("V100x1", V100, 1), ("V100x4", V100X4, 4), ("H100x8", H100, 8))
    for index, zone in enumerate(recorded(dataset))
}
CASES = MULTI | ONE_ZONE
RATIOS = (1.1, 1.25, 1.5, 2.0, 3.0)
STARTS_S = (200.0, 600.0)


def windows_of(
    case: Case, *, half: str, work_h: float, count: int, ratio: float, start_s: float
) -> tuple[Windows, NDArray[np.int64]] | None:
    """Return windows of the half, and the day on which each begins; None if none fits."""
    zones = recorded(case.dataset)
    chosen = [zones[index] for index in case.zones] if case.zones else list(zones)
    length = min(len(zone.capacity) for zone in chosen)
    gap_s = chosen[0].gap_s
    ticks = int(np.ceil(work_h * ratio * 3600 / gap_s))
    low, high = (0, length // 2) if half == "tune" else (length // 2, length)
    if high - low < ticks:
        return None
    begins = np.unique(np.linspace(low, high - ticks, count).astype(int))
    made = cut(
        chosen,
        gang=case.gang,
        work_h=work_h,
        deadline_h=work_h * ratio,
        start_s=start_s,
        begins=[int(each) for each in begins],
    )
    return made, (begins * gap_s // 86_400).astype(np.int64)


def interval(
    values: NDArray[np.float64],
    clusters: NDArray[np.int64],
    weights: NDArray[np.float64] | None = None,
) -> tuple[float, float]:
    """Return the 95 % interval of the mean, from 2000 draws of whole clusters.

    With weights, of the sum of the values over the sum of the weights.
    """
    names = np.unique(clusters)
    weights = np.ones_like(values) if weights is None else weights
    sums = np.array([values[clusters == name].sum() for name in names])
    sizes = np.array([weights[clusters == name].sum() for name in names])
    drawn = np.random.default_rng(0).integers(0, len(names), (2000, len(names)))
    means = sums[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)
