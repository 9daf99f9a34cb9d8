"""Say when a training's numbers are no numbers any more: its weights at a save, its losses.

Nobody asks a device for anything here. Weights are looked at in the copy that a save has made, by
its background thread; losses where they have arrived, with the heartbeat and the metrics.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from spotguard.checkpoint.shard import ShardLayout
    from spotguard.runtime.state.tree import Leaf

FINITE: Final = "finite"
"""The counter of a checkpoint that says whether its weights are finite."""
_AT_ONCE = 1 << 15
"""So few elements stay in a core's cache, and torch adds them up without its helpers' help."""
_SUMS = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
"""The dtypes that are looked at, and what each is added up in."""


def first_not_finite(
    leaves: Sequence[Leaf],
    layout: ShardLayout,
    data: Sequence[memoryview],
    names: Collection[str],
    *,
    most: int | None = None,
) -> str | None:
    """Return the first of the leaves called `names` that holds NaN or an infinite value, or None.

    `data` are their bytes in the layout's order, in one piece or a piece for each. Takes a tenth
    of a second a gigabyte. Of each leaf only the first `most` elements are looked at, if given.
    """
    for place, index in enumerate(layout.order):
        leaf = leaves[index]
        count = leaf.tensor.numel()
        if leaf.name not in names or not count or leaf.tensor.dtype not in _SUMS:
            continue
        whole = len(data) == 1
        flat = torch.frombuffer(
            data[0 if whole else place],
            dtype=leaf.tensor.dtype,
            count=count if most is None else min(count, most),
            offset=layout.offset(leaf.name) if whole else 0,
        )
        # A sum is finite only if all that is added up is, and costs half of what isfinite does.
        sums = [part.sum(dtype=_SUMS[flat.dtype]) for part in torch.split(flat, _AT_ONCE)]
        if not bool(torch.isfinite(torch.stack(sums)).all()):
            return leaf.name
    return None


class LossWatch:
    """Tells once when a loss is no finite number any more; for the threads that report."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._finite_at: dict[str, int] = {}
        self._told = False

    def look(self, name: str, steps_done: int, value: float | None) -> None:
        """Take the value of a loss after so many steps, as it has arrived."""
        if value is None or self._told:
            return
        if math.isfinite(value):
            self._finite_at[name] = steps_done
            return
        self._told = True
        before = self._finite_at.get(name)
        since = "" if before is None else f" (after step {before} it still was a number)"
        self._tell(
            f"{name} is {value} after step {steps_done}{since}: look at the learning rate, the data"
            " and the loss scale, and stop the run if this is no single step; the last checkpoint "
            "with finite weights is kept"
        )


def is_loss(name: str) -> bool:
    """Return whether a metric is one that `LossWatch` shall see, by its name."""
    return "loss" in name.lower()
