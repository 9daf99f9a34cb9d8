"""Writing to tensors of which several elements lie in one place of memory, as `expand` makes them.

Torch reads such a tensor like any other and refuses to write to it: a module with an expanded mask
would train and be saved, and could never be restored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.errors import StateMismatch

if TYPE_CHECKING:
    import torch


def fill(target: torch.Tensor, values: torch.Tensor) -> None:
    """Give `target` these values, of its own shape; to an expanded one once for each place.

    Raises:
        StateMismatch: elements that lie in one place would have to differ.
    """
    axes = [a for a, s in enumerate(target.stride()) if s == 0 and target.shape[a] > 1]
    if not axes:
        target.copy_(values)
        return
    once, values_once = target, values
    for axis in axes:
        once, values_once = once.narrow(axis, 0, 1), values_once.narrow(axis, 0, 1)
    if not _same(values_once.expand(values.shape), values):
        raise StateMismatch(
            f"a tensor of shape {tuple(target.shape)} is expanded from one of {tuple(once.shape)} "
            "in this script, and has values in the checkpoint that differ along it",
            hint="call .clone() on what expand() returns",
        )
    once.copy_(values_once)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether all values are equal, or no numbers in both."""
    return bool(((one == other) | ((one != one) & (other != other))).all())
