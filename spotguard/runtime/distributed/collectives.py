"""What gradients ask of the other ranks."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from spotguard.runtime.state.filling import fill, flat_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager


class Collectives(Protocol):
    """The ranks of an attempt; every method must be called by all of them in the same order."""

    rank: int
    world_size: int

    def add_up(self, flat: torch.Tensor) -> Callable[[], None]:
        """Begin to replace `flat` by its sum over the ranks; the result blocks until it is."""

    def exchange(self, parts: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Send part `r` of `parts` to rank `r`; return what the ranks sent here, by rank.

        Args:
            parts: Of shape (ranks, rows, columns); other ranks may send other numbers of rows.
            counts: How many rows each rank sends to each.

        Returns:
            All rows that came, of shape (sum of counts, columns).
        """

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the flat tensors of all ranks, of one length, one after the other."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by the first rank's."""


class ProcessGroup:
    """The default process group; a single rank needs none."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.waited_s: float | None = None
        """Seconds in which this process waited for sums; None on GPUs, which wait by themselves."""
        self.waits: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        """Returns what names such a wait in a profile."""

    def add_up(self, flat: torch.Tensor) -> Callable[[], None]:
        """Begin to replace `flat` by its sum over the ranks; the result blocks until it is."""
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None

        def wait() -> None:
            began = time.perf_counter()
            with self.waits():
                work.wait()
            if not flat.is_cuda:
                self.waited_s = (self.waited_s or 0.0) + time.perf_counter() - began

        return wait

    def exchange(self, parts: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Send part `r` of `parts` to rank `r`; return what the ranks sent here, by rank."""
        ranks, rows, columns = parts.shape
        received = parts.new_empty(sum(counts) * columns)
        dist.all_to_all_single(
            received,
            parts.reshape(-1),
            output_split_sizes=[count * columns for count in counts],
            input_split_sizes=[rows * columns] * ranks,
        )
        return received.view(-1, columns)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the flat tensors of all ranks, of one length, one after the other."""
        whole = part.new_empty(self.world_size * len(part))
        dist.all_gather_into_tensor(whole, part)
        return whole

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by the first rank's."""
        # As bytes in order: backends know neither every dtype nor every layout.
        whole = tensor.resolve_conj().resolve_neg().contiguous()
        dist.broadcast(flat_bytes(whole), src=0)
        if whole.data_ptr() != tensor.data_ptr():
            fill(tensor, whole)
