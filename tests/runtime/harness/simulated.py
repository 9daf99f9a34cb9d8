"""Ranks played by threads of one process, for the tests of gradients."""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

import torch

from spotguard.runtime.data.loader import ElasticLoader
from spotguard.runtime.distributed.bitwise_reduce import BitwiseSync
from spotguard.runtime.distributed.gradients import GradientSync, loss_weight
from tests.runtime.harness.lab import together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Meeting:
    """Where the ranks lay down what they send; it breaks for all if one fails."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size, timeout=20)
        self._table: list[Any] = [None] * world_size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return what all ranks brought, by rank."""
        self._table[rank] = value
        self._barrier.wait()
        found = list(self._table)
        self._barrier.wait()
        return found


class SimulatedRank:
    """One rank's `Collectives`; counts the bytes that it sends to others."""

    def __init__(self, rank: int, world_size: int, meeting: Meeting) -> None:
        self.rank = rank
        self.world_size = world_size
        self.sent_bytes = 0
        self._meeting = meeting

    def add_up(self, flat: torch.Tensor) -> Callable[[], None]:
        """Sum in the order of the ranks."""
        every = self._meeting.exchange(self.rank, flat.clone())
        flat.copy_(torch.stack(every).sum(0))
        return lambda: None

    def exchange(self, parts: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Give every rank its part."""
        self.sent_bytes += parts.nbytes - parts[self.rank].nbytes
        every = self._meeting.exchange(self.rank, parts.clone())
        mine = [sent[self.rank] for sent in every]
        assert [len(rows) for rows in mine] == list(counts), "the ranks disagree on the plan"
        return torch.cat(mine)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Put all parts together."""
        self.sent_bytes += part.nbytes * (self.world_size - 1)
        return torch.cat(self._meeting.exchange(self.rank, part.clone()))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Take the first rank's."""
        tensor.copy_(self._meeting.exchange(self.rank, tensor.clone())[0])


def simulated_ranks(world_size: int) -> list[SimulatedRank]:
    """Return the ranks of one attempt."""
    meeting = Meeting(world_size)
    return [SimulatedRank(rank, world_size, meeting) for rank in range(world_size)]


class Training:
    """What the script of one rank has, and one step of it, without a `Run`."""

    def __init__(
        self,
        ranks: SimulatedRank,
        model: torch.nn.Module,
        loss_of: Callable[[torch.nn.Module, list[int]], torch.Tensor],
        *,
        exact: bool,
        samples: int,
        global_batch: int,
        micro_batch: int,
        by_hand: bool = False,
        trained: Callable[[torch.nn.Module], Iterable[torch.Tensor]] = torch.nn.Module.parameters,
    ) -> None:
        self.model = copy.deepcopy(model)  # seeding one would be no matter of one thread
        self.optimizer = torch.optim.AdamW(trained(self.model), lr=0.1)
        self._loss_of = loss_of
        self._loader = ElasticLoader(
            range(samples), global_batch_size=global_batch, micro_batch_size=micro_batch,
            shuffle=True, drop_last=False, seed=5, reseed=False, collate_fn=list, num_workers=0,
            options={}, rank=ranks.rank, world_size=ranks.world_size,
        )  # fmt: skip
        tracked = [] if by_hand else [self.optimizer]
        self.sync: GradientSync | BitwiseSync = (
            BitwiseSync([self.model], tracked, ranks, self._loader)
            if exact
            else GradientSync([self.model], tracked, ranks)
        )

    def gradients(self, number: int, *, reduction: str = "mean") -> list[torch.Tensor | None]:
        """Go through the micro-batches of a step; return the gradients."""
        for share, batch in self._loader.read(number, number + 1):
            self.sync.begin(share)
            losses = self._loss_of(self.model, batch)
            loss = losses.sum() if reduction == "sum" else losses.mean()
            self.sync.backward(loss, loss_weight(share, reduction), share)
        return [p.grad for p in self.model.parameters()]


def on_ranks(world_size: int, do: Callable[[SimulatedRank], Any]) -> list[Any]:
    """Return what `do` returned on each rank; raise what one raised."""

    def guarded(rank: SimulatedRank) -> Any:
        try:
            return do(rank)
        except BaseException:
            rank._meeting._barrier.abort()
            raise

    ranks = simulated_ranks(world_size)
    found = together(*[lambda rank=rank: guarded(rank) for rank in ranks])
    problems = [f for f in found if isinstance(f, Exception)]
    problems.sort(key=lambda problem: isinstance(problem, threading.BrokenBarrierError))
    for problem in problems:
        raise problem
    return found
