"""A script's own `no_sync` around a step's last micro-batch, which keeps DDP from adding up.

Scripts that accumulate by themselves leave it out for what is their last micro-batch on a number of
ranks that they know. On another number it covers the step's last one, too: each rank then trains on
its own gradients, and nothing fails.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from spotguard.errors import UsageError
from spotguard.runtime.distributed.wrappers import parameters_synchronised_by

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    import torch
    from torch.nn.parallel import DistributedDataParallel


class NoSyncWatch:
    """Refuses gradients that a DDP should have added up, and did not, as it was told not to."""

    def __init__(self, ddps: Iterable[DistributedDataParallel]) -> None:
        self._ddps = list(ddps)
        self._expected: list[DistributedDataParallel] = []
        """Those that are to add up in the micro-batch under way."""
        self._entered: set[int] = set()
        """The ids of those whose `no_sync` was entered in it."""
        self._before: list[tuple[torch.Tensor, torch.Tensor | None, int]] = []
        """Parameters in doubt, each with its gradient before the backward pass, and its version."""
        for ddp in self._ddps:
            # Its flag is as before again after a forward pass within it, which is what counts.
            ddp.__dict__["no_sync"] = functools.partial(self._no_sync, ddp)

    def _no_sync(self, ddp: DistributedDataParallel) -> AbstractContextManager[Any]:
        self._entered.add(id(ddp))
        context: AbstractContextManager[Any] = type(ddp).no_sync(ddp)
        return context

    def begin(self, expected: list[DistributedDataParallel]) -> None:
        """Take note that a micro-batch begins, after which these are to have added up."""
        self._expected = expected
        self._entered.clear()

    def before_backward(self) -> None:
        """Take note of the gradients that may be about to stay this rank's own."""
        doubtful = [ddp for ddp in self._expected if self._is_held_back(ddp)]
        parameters = (p for ddp in doubtful for p in parameters_synchronised_by(ddp))
        self._before = [(p, p.grad, _changes_of(p.grad)) for p in parameters]

    def _is_held_back(self, ddp: DistributedDataParallel) -> bool:
        """Return True if its last forward pass was none to add up after, and was told so.

        By the first alone, an evaluation without gradients looks the same; by the second, a
        `no_sync` around the backward pass, which changes nothing.
        """
        told = not ddp.require_backward_grad_sync or id(ddp) in self._entered
        return told and not ddp.require_forward_param_sync

    def after_backward(self) -> None:
        """Look whether gradients came that nobody has added up.

        Raises:
            UsageError: some did.
        """
        before, self._before = self._before, []
        if any(p.grad is not was or _changes_of(p.grad) != version for p, was, version in before):
            raise UsageError(
                "a step's last micro-batch was trained on under no_sync(), so that "
                "DistributedDataParallel did not add up the gradients: the ranks would train apart",
                hint="leave no_sync() out of the loop: gradients are added up once a step without "
                "it, after its last micro-batch, whose number depends on that of the ranks",
            )

    def close(self) -> None:
        """Watch no more."""
        for ddp in self._ddps:
            ddp.__dict__.pop("no_sync", None)


def _changes_of(gradient: torch.Tensor | None) -> int:
    return -1 if gradient is None else gradient._version
