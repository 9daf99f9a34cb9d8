"""Gradients of a global batch, summed over micro-batches and ranks, synchronised once per step.

Each micro-batch's mean loss is weighted by its share of the global batch, so the sum over all
ranks is the mean over the global batch whatever the number of ranks.

- A model in `DistributedDataParallel` or FSDP2 synchronises itself, and divides by the number of
  ranks; the weight is multiplied by it to undo that. Its synchronisation is switched off but for
  the last micro-batch.
- FSDP2 meets in every forward pass, too, so each rank needs as many of them: one that has fewer
  micro-batches than others runs its last one again, with weight zero.
- Parameters of a tracked optimizer that nobody synchronises are summed here, in flat buckets. So
  are those that were frozen when DDP took its own, or came later: it never looks at them. And so
  are those of tracked modules that the script trains by hand, without a tracked optimizer.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.autograd.graph import _engine_run_backward

from spotguard.errors import UsageError
from spotguard.runtime.distributed.buckets import cut_into_buckets, flatten, own_copy, unflatten
from spotguard.runtime.distributed.by_hand import TrainedByHand
from spotguard.runtime.distributed.kept_gradients import KeptGradients
from spotguard.runtime.distributed.no_sync import NoSyncWatch
from spotguard.runtime.distributed.wrappers import (
    LateWrappers,
    find_wrappers,
    frozen_in,
    parameters_of,
    parameters_synchronised_by,
    refuse_thawed,
    settle_buckets,
)
from spotguard.runtime.state.module_buffers import BufferSync
from spotguard.runtime.state.sharding import is_dtensor, is_fsdp1_module, is_fsdp_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from spotguard.runtime.data.loader import Share
    from spotguard.runtime.distributed.collectives import Collectives

T = TypeVar("T")


class GradientSync:
    """Weights losses and synchronises gradients for the tracked models and optimizers."""

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        ranks: Collectives,
    ) -> None:
        self._ranks = ranks
        self._modules = modules = list(modules)
        self._optimizers = list(optimizers)
        _refuse_fsdp1(modules)
        self._buffers = BufferSync(modules, ranks)
        self._wrappers = wrappers = find_wrappers(modules, self._optimizers)
        self._late = LateWrappers(modules, self._optimizers, wrappers.modules)
        self._of_ddp = [p for ddp in wrappers.ddp for p in parameters_synchronised_by(ddp)]
        self._left_out = [p for ddp in wrappers.ddp for p in frozen_in(ddp)]
        self._by_hand = TrainedByHand(modules, self._optimizers, ranks)
        for ddp in wrappers.ddp:
            refuse_thawed(ddp)
            settle_buckets(ddp)
        self._no_sync = NoSyncWatch(wrappers.ddp if ranks.world_size > 1 else [])
        self._kept = KeptGradients(self._optimizers)
        self._is_last = False
        """True while the step's last micro-batch is under way."""
        self.managed_elsewhere = bool(wrappers.modules)
        self.meets_in_forward = any(map(_meets_in_forward, [*modules, *wrappers.modules]))
        """True if all ranks must run as many forward passes in a step; see `evened_out`."""
        self._only: set[int] | None = None
        """The parameters whose gradients the phase is for; None if for all."""
        self._ever_begun = False
        self._begun = False
        """True between the first and the last backward pass of a synchronisation."""
        self._look_at_parameters()

    def _look_at_parameters(self) -> None:
        managed = self._managed() - {id(p) for p in self._left_out if p.requires_grad}
        of_optimizers = parameters_of(self._optimizers)
        self._by_hand.look(managed)
        self._known = self._count_parameters()
        several = self._ranks.world_size > 1
        found = (*of_optimizers, *self._by_hand.adopted)
        self._parameters = _unsynchronised(found, managed) if several else []
        self._counted = {id(p): p for p in (*self._parameters, *self._by_hand.candidates)}
        # A loss that spans both kinds would be scaled for one of them only.
        self._correction = 1.0 / self._ranks.world_size if self.managed_elsewhere else 1.0

    def _look_again(self) -> None:
        if self._count_parameters() != self._known:
            self._look_at_parameters()

    def _count_parameters(self) -> tuple[int, list[bool], list[tuple[int, bool]]]:
        """Return what changes where others are to be synchronised; a script may thaw some."""
        thawed = [p.requires_grad for p in self._left_out]
        return count_parameters(self._optimizers), thawed, self._by_hand.state()

    def _managed(self) -> set[int]:
        """Return the ids of what synchronises itself: of DDP's, those that it was made with."""
        others = (m for m in self._wrappers.modules if is_fsdp_module(m))
        of_fsdp = (p for module in others for p in parameters_synchronised_by(module))
        return set(map(id, (*self._of_ddp, *of_fsdp)))

    @contextlib.contextmanager
    def only(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        """Synchronise only the parameters of `optimizers`; all others keep the gradients they had.

        Raises:
            UsageError: one of `optimizers` is not tracked.
        """
        with only_parameters_of(optimizers, self._modules, self._optimizers) as self._only:
            try:
                yield
            finally:
                self._only = None

    @contextlib.contextmanager
    def without_buffers(self) -> Iterator[None]:
        """Within it DDP broadcasts no buffers before a forward pass: a rank may not get there."""
        before = [(ddp, ddp.require_forward_param_sync) for ddp in self._wrappers.ddp]
        for ddp, _ in before:
            ddp.require_forward_param_sync = False
        try:
            yield
        finally:
            for ddp, was in before:
                ddp.require_forward_param_sync = was

    def _is_wanted(self, parameter: torch.Tensor) -> bool:
        return self._only is None or id(parameter) in self._only

    def begin(self, share: Share) -> None:
        """Prepare for the forward pass of a micro-batch; the last one synchronises."""
        self._is_last = share.last
        for ddp in self._wrappers.ddp:
            wanted = self._only is None or any(map(self._is_wanted, ddp.parameters()))
            ddp.require_backward_grad_sync = share.last and wanted
        if self._ranks.world_size > 1:
            self._no_sync.begin([d for d in self._wrappers.ddp if d.require_backward_grad_sync])
        self._tell_fsdp(synchronise=share.last)

    def _tell_fsdp(self, *, synchronise: bool) -> None:
        for fsdp in self._wrappers.fsdp:
            fsdp.set_requires_gradient_sync(synchronise, recurse=False)

    def backward(self, loss: torch.Tensor, weight: float, share: Share) -> None:
        """Add the gradient of `weight * loss`; after the last one, gradients are the global mean.

        Blocks until the ranks have met, when the share is the step's last one here.
        """
        run_backward(loss, self.begin_backward(weight))
        self.end_backward(share)

    def begin_backward(self, weight: float) -> float:
        """Prepare for a backward pass; return what its loss is to be multiplied by for `weight`."""
        if self._begun:
            self._kept.look()
        else:
            self._begun = True
            self._kept.begin()
            if not self._ever_begun:
                self._ever_begun = True
                self._late.refuse()
            if self._ranks.world_size > 1:  # alone nothing is counted twice, and nothing added up
                self._look_again()
                self._count_once(filter(self._is_wanted, self._counted.values()))
        if self._is_last and self._ranks.world_size > 1:
            # A script that accumulates by itself may have told it something else since `begin`.
            self._tell_fsdp(synchronise=True)
            self._no_sync.before_backward()
        return weight * self._ranks.world_size if self.managed_elsewhere else weight

    def end_backward(self, share: Share) -> None:
        """Synchronise after the backward pass of the step's last micro-batch; blocks, as above."""
        if not share.last:
            self._kept.take(self._only)
        else:
            self._begun = False
            self._look_again()
            if self._ranks.world_size > 1:
                self._no_sync.after_backward()
                self._synchronise()

    def _synchronise(self) -> None:
        if self._only is None and self._by_hand.adopt():
            self._look_at_parameters()
            self._by_hand.tell(self._by_hand.adopted)
        self._reduce(filter(self._is_wanted, self._parameters))
        self._buffers.share()

    def _count_once(self, parameters: Iterable[torch.Tensor]) -> None:
        """Have the first rank bring what gradients there are already; they are a mean of all."""
        for parameter in parameters:
            if parameter.grad is not None:
                if self._ranks.rank:
                    parameter.grad.zero_()
                elif self._correction != 1.0:
                    parameter.grad /= self._correction

    def refuse_lost(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse that `optimizer` steps on what is left of gradients that were thrown away.

        Raises:
            UsageError: a script did so between the step's micro-batches; on one rank, too.
        """
        self._kept.refuse_lost(optimizer)

    def catch_up(self) -> None:
        """Synchronise parameters that an optimizer got after the last backward pass.

        Blocks until the ranks have met, if there are any.
        """
        if self._ranks.world_size > 1 and self._count_parameters() != self._known:
            known = set(map(id, self._parameters))
            self._look_at_parameters()
            self._reduce(p for p in self._parameters if id(p) not in known)

    def synchronised(self) -> set[int]:
        """Return the ids of the parameters whose gradients become the global mean.

        But for those that only the script may train: an optimizer that does is to be tracked.
        """
        by_hand = set(map(id, self._by_hand.adopted))
        return set(map(id, self._parameters)) - by_hand | self._managed()

    @property
    def may_be_trained_by_hand(self) -> bool:
        """True if parameters have gradients, which no tracked optimizer has."""
        return self._by_hand.have_gradients

    def close(self) -> None:
        """Let what wraps a module synchronise by itself again."""
        self._late.close()
        self._no_sync.close()
        for ddp in self._wrappers.ddp:
            ddp.require_backward_grad_sync = True
        self._tell_fsdp(synchronise=True)

    def _reduce(self, parameters: Iterable[torch.Tensor]) -> None:
        buckets = list(cut_into_buckets(parameters))
        flats = [flatten(bucket, [p.grad for p in bucket]) for bucket in buckets]
        waits = [self._ranks.add_up(flat) for flat in flats]
        for bucket, flat, wait in zip(buckets, flats, waits, strict=True):
            wait()
            for parameter, gradient in zip(bucket, unflatten(bucket, flat), strict=True):
                if gradient is None:
                    continue
                if self._correction != 1.0:
                    gradient *= self._correction
                if parameter.grad is None:
                    parameter.grad = own_copy(parameter, gradient)
                else:
                    parameter.grad.copy_(gradient)


def evened_out(
    batches: Iterable[tuple[Share, T]], rank: int, ranges: Callable[[int], Sequence[range]]
) -> Iterator[tuple[Share, T]]:
    """Yield a rank's micro-batches, and its last one again with weight zero while others have more.

    `ranges` tells which micro-batches of a step each rank has.
    """
    for share, batch in batches:
        if not share.last:
            yield share, batch
            continue
        counts = [max(1, len(mine)) for mine in ranges(share.step)]
        missing = max(counts) - counts[rank]
        yield share._replace(last=not missing), batch
        for more in reversed(range(missing)):
            yield share._replace(weight=0.0, last=not more), batch


@contextlib.contextmanager
def only_parameters_of(
    optimizers: Sequence[torch.optim.Optimizer],
    modules: Iterable[torch.nn.Module],
    tracked: Iterable[torch.optim.Optimizer],
) -> Iterator[set[int] | None]:
    """Give the ids of these optimizers' parameters; what others get meanwhile is thrown away.

    Without any `optimizers` that is None: all parameters count.

    Raises:
        UsageError: one of `optimizers` is not among `tracked`.
    """
    if not optimizers:
        yield None
        return
    if any(all(one is not known for known in tracked) for one in optimizers):
        raise UsageError(
            "step.phase: one of its optimizers is not tracked",
            hint="call run.track(optimizer=optimizer) before the loop",
        )
    wanted = set(map(id, parameters_of(optimizers)))
    every = {id(p): p for p in parameters_of(tracked)}
    every.update((id(p), p) for module in modules for p in module.parameters())
    others = [p for p in every.values() if id(p) not in wanted]
    # A view lies in DDP's own bucket, which is about to be written to.
    kept = [p.grad.clone() if p.grad is not None and p.grad._is_view() else p.grad for p in others]
    for parameter in others:
        parameter.grad = None
    try:
        yield wanted
    finally:
        for parameter, gradient in zip(others, kept, strict=True):
            parameter.grad = gradient


def _meets_in_forward(module: torch.nn.Module) -> bool:
    return any(is_fsdp_module(m) or isinstance(m, torch.nn.SyncBatchNorm) for m in module.modules())


def loss_weight(share: Share, reduction: str) -> float:
    """Return by how much the loss of a micro-batch counts in the global mean.

    Raises:
        UsageError: `reduction`, over the samples, is neither `mean`, `sum` nor `part`.
    """
    if reduction not in ("mean", "sum", "part"):
        raise UsageError(f"step.backward: reduction is {reduction!r}; allowed: mean, sum, part")
    if reduction == "part":
        return 1.0 if share.weight else 0.0
    return share.weight / len(share.indices) if reduction == "sum" else share.weight


def _refuse_fsdp1(modules: Iterable[torch.nn.Module]) -> None:
    if any(is_fsdp1_module(part) for module in modules for part in module.modules()):
        raise UsageError(
            "FullyShardedDataParallel keeps parts of parameters that look like whole ones",
            hint="use torch.distributed.fsdp.fully_shard (FSDP2)",
        )


def run_backward(loss: torch.Tensor, scale: float) -> None:
    """Add the gradient of `scale * loss` to those of the parameters."""
    if type(loss) is not torch.Tensor or loss.numel() != 1:
        (loss * scale).backward()  # type: ignore[no-untyped-call]
        return
    # The same bits as of `loss * scale`, without that product and its node in the graph; and the
    # call that `Tensor.backward` ends in, without its 15 microseconds of looking at arguments.
    gradient = _filled(scale, loss.shape, loss.dtype, loss.device)
    _engine_run_backward(
        (loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


@functools.lru_cache(maxsize=64)
def _filled(
    value: float, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype, device=device)


def broadcast_initial(modules: Iterable[torch.nn.Module], ranks: Collectives) -> None:
    """Give all ranks the first rank's parameters and buffers, as DDP does when it is built."""
    if ranks.world_size == 1:
        return
    with torch.no_grad():
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                if not is_dtensor(tensor):
                    ranks.broadcast(tensor.detach())


def count_parameters(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return the optimizers' parameters; `add_param_group` may make them more in mid-run."""
    count = 0
    for optimizer in optimizers:  # each step asks: a generator's turns would take longer than this
        for group in optimizer.param_groups:
            count += len(group["params"])
    return count


def _unsynchronised(parameters: Iterable[torch.Tensor], managed: set[int]) -> list[torch.Tensor]:
    """Return the parameters whose ids are not among what DDP or FSDP synchronises, each once."""
    found = {id(p): p for p in parameters if id(p) not in managed}
    return [parameter for parameter in found.values() if not is_dtensor(parameter)]
