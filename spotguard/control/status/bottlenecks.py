"""What holds training up, in words, by what the job measured of itself. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.events import metric

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

STARVED_SHARE = 0.2
"""Of a step spent waiting for data: beyond it the loader is worth some work."""
IDLE_PCT = 40.0
"""A GPU that is busy for a smaller part of the time is paid for in vain."""


def bottlenecks(metrics: Mapping[str, float]) -> Iterator[str]:
    """Yield a sentence for each thing that wastes the nodes' time, with the lever against it."""
    share = share_of_step(metrics, metric.DATA_S)
    if share is not None and share > STARVED_SHARE:
        yield (
            f"the data loader starves the step: {100 * share:.0f} % of each step waits for data; "
            "raise num_workers of run.loader, or make samples cheaper to read (fewer, larger "
            "files; decoded beforehand; on the node's own disk)"
        )
    busy = mean_of(metrics, "utilization_pct")
    if busy is not None and busy < IDLE_PCT:
        lever = (
            "feed it faster, as said above"
            if share is not None and share > STARVED_SHARE
            else "raise micro_batch_size of run.loader, try torch.compile or bfloat16, or take a "
            "smaller GPU"
        )
        yield f"the GPU idles: it is busy {busy:.0f} % of the time; {lever}"


def share_of_step(metrics: Mapping[str, float], part: str) -> float | None:
    """Return which share (0..1) of a step went into a part of it; None is unknown."""
    step_s, part_s = metrics.get(metric.STEP_S), metrics.get(part)
    if step_s is None or part_s is None or step_s <= 0:
        return None
    return min(1.0, max(0.0, part_s / step_s))


def mean_of(metrics: Mapping[str, float], what: str) -> float | None:
    """Return the mean of a measure over all nodes, or over all their GPUs; None is unknown."""
    values = of_all(metrics, what)
    return sum(values) / len(values) if values else None


def of_all(metrics: Mapping[str, float], what: str) -> list[float]:
    """Return a measure of each node, or of each of their GPUs."""
    names = ((metric.of_node(name), value) for name, value in metrics.items())
    return [value for place, value in names if place is not None and place[2] == what]
