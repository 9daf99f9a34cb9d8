"""Gradients added up in one order, whatever the number of ranks: `init(exact="bitwise")`.

Floating-point addition is not associative, so a sum over micro-batches depends on who adds up
what first. Here the order is that of one binary tree over the micro-batches of a step: node `i` of
level `k` is the sum of the `2 ** k` leaves from `i * 2 ** k` on, its left half plus its right half;
where there are no leaves any more on the right, it is its left half. So the tree depends on the
number of micro-batches only.

A rank trains on a contiguous range of leaves and adds up the largest whole nodes within it, at
most two of each level. Then all ranks become the owners of one slice of the gradient each,
exchange the nodes' slices, finish the same tree, and share the results:

    leaves     0 1 2 | 3 4 5 | 6 7       on three ranks
    nodes     (0 1) 2 | 3 (4 5) | (6 7)  what each has to send
    owners    ((0 1) + (2 + 3)) + ((4 5) + (6 7))
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from spotguard.errors import UsageError
from spotguard.runtime.distributed.buckets import cut_into_buckets, flatten, own_copy, unflatten
from spotguard.runtime.distributed.by_hand import TrainedByHand
from spotguard.runtime.distributed.gradients import (
    count_parameters,
    only_parameters_of,
    run_backward,
)
from spotguard.runtime.distributed.wrappers import LateWrappers, find_wrappers, parameters_of
from spotguard.runtime.state.module_buffers import BufferSync
from spotguard.runtime.state.sharding import is_dtensor, is_fsdp1_module, is_sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from spotguard.runtime.data.loader import Loader, Share
    from spotguard.runtime.distributed.collectives import Collectives

T = TypeVar("T")
Gradients = list["torch.Tensor | None"]
"""One for each parameter; None where it was not used."""


@dataclass(frozen=True, slots=True)
class SumNode(Generic[T]):
    """The sum of the `2 ** level` leaves from `number * 2 ** level` on."""

    level: int
    number: int
    value: T

    def completes(self, other: SumNode[T]) -> bool:
        """Return whether this is the right half of a node, and `other` its left half."""
        return self.number & 1 == 1 and (other.level, other.number) == (self.level, self.number - 1)


class TreeSum(Generic[T]):
    """Adds up values in the order of the tree, as they come from left to right.

    It holds two nodes of each level at most. `add` may change its first argument.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self.nodes: list[SumNode[T]] = []
        """The largest whole nodes of what came so far, from left to right."""

    def push(self, node: SumNode[T]) -> None:
        """Take the next node, and add up what is whole by now."""
        while self.nodes and node.completes(self.nodes[-1]):
            value = self._add(self.nodes.pop().value, node.value)
            node = SumNode(node.level + 1, node.number >> 1, value)
        self.nodes.append(node)

    def total(self) -> T:
        """Return the whole sum, once all leaves from the first to the last have come."""
        total = self.nodes.pop().value
        while self.nodes:  # their levels fall from left to right: the tree's right edge
            total = self._add(self.nodes.pop().value, total)
        return total


def whole_nodes(leaves: range) -> list[SumNode[None]]:
    """Return the nodes that a rank with these leaves has, from left to right."""
    tree: TreeSum[None] = TreeSum(lambda _left, _right: None)
    for leaf in leaves:
        tree.push(SumNode(0, leaf, None))
    return tree.nodes


class BitwiseSync:
    """Synchronises gradients like `GradientSync`, to the last bit the same for every world size.

    Between micro-batches the parameters have no gradients: each one's are taken away into the
    tree. Needs whole parameters on every rank.

    Args:
        modules: All tracked models; of those in DDP, the synchronisation is switched off.
        optimizers: All tracked optimizers.
        ranks: The ranks of this attempt.
        loader: Tells which micro-batches of a step each rank trains on.

    Raises:
        UsageError: the models cannot be the same on every number of ranks.
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        ranks: Collectives,
        loader: Loader,
    ) -> None:
        self._modules = modules = list(modules)
        self._ranks = ranks
        self._loader = loader
        self._buffers = BufferSync(modules, ranks)
        self._optimizers = list(optimizers)
        wrappers = find_wrappers(modules, self._optimizers)
        self._ddp = wrappers.ddp
        self._late = LateWrappers(modules, self._optimizers, wrappers.modules)
        self._by_hand = TrainedByHand(modules, self._optimizers, ranks)
        self._look_at_parameters()
        self.meets_in_forward = self.managed_elsewhere = False
        self._before: Gradients = []
        self._tree = TreeSum(_add)
        self._ever_begun = self._begun = False
        if not loader.any_world:
            raise UsageError(
                'exact="bitwise": with one stream for each rank, samples depend on the ranks',
                hint="pass run.loader a function that opens one shard, or leave exact out",
            )
        _refuse_what_depends_on_ranks(modules, self._parameters)

    def _look_at_parameters(self) -> None:
        of_ddp = [p for module in self._ddp for p in module.parameters()]
        self._by_hand.look(set(map(id, of_ddp)))
        # Not only those in use: what a first step adds up must be in the tree from its beginning.
        found = [*parameters_of(self._optimizers), *of_ddp, *self._by_hand.candidates]
        self._parameters = list({id(p): p for p in found}.values())
        self._known = self._count_parameters()

    def _count_parameters(self) -> tuple[int, list[tuple[int, bool]]]:
        return count_parameters(self._optimizers), self._by_hand.state()

    @contextlib.contextmanager
    def only(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
        """Keep the gradients of what is not of `optimizers`, if any are given, as they are.

        Raises:
            UsageError: one of `optimizers` is not tracked.
        """
        with only_parameters_of(optimizers, self._modules, self._optimizers):
            yield

    def refuse_lost(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse nothing: gradients are in the tree before a script could throw them away."""

    def catch_up(self) -> None:
        """Refuse parameters that an optimizer got after the backward pass.

        Raises:
            UsageError: one has a gradient, whose parts were added up in this rank's order.
        """
        if self._count_parameters() != self._known:
            known = set(map(id, self._parameters))
            self._look_at_parameters()
            if any(p.grad is not None for p in self._parameters if id(p) not in known):
                raise UsageError(
                    'exact="bitwise": add_param_group() came between backward and optimizer.step()',
                    hint="call it after optimizer.step(), or before the step's first micro-batch",
                )

    def synchronised(self) -> set[int]:
        """Return what `GradientSync.synchronised` does."""
        return set(map(id, self._parameters)) - set(map(id, self._by_hand.candidates))

    @property
    def may_be_trained_by_hand(self) -> bool:
        """Return what `GradientSync.may_be_trained_by_hand` does."""
        return self._by_hand.have_gradients

    def close(self) -> None:
        """Let what wraps a module synchronise by itself again."""
        self._late.close()
        for module in self._ddp:
            module.require_backward_grad_sync = True

    def begin(self, share: Share) -> None:
        """Prepare for the forward pass of a micro-batch."""
        for module in self._ddp:
            module.require_backward_grad_sync = False

    def backward(self, loss: torch.Tensor, weight: float, share: Share) -> None:
        """Put the gradient of `weight * loss` into the tree; after the last one, sum it up.

        Blocks until the ranks have met, when the share is the step's last one here.
        """
        run_backward(loss, self.begin_backward(weight))
        self.end_backward(share)

    def begin_backward(self, weight: float) -> float:
        """Prepare for a backward pass; return what its loss is to be multiplied by: `weight`."""
        if not self._begun and self._count_parameters() != self._known:
            self._look_at_parameters()
        taken = self._take()
        if not self._ever_begun:
            self._ever_begun = True
            self._late.refuse()
        if not self._begun:
            self._begun, self._before, self._tree = True, taken, TreeSum(_add)
        return weight

    def end_backward(self, share: Share) -> None:
        """Take the gradients into the tree; blocks, as above."""
        if share.weight:  # else this rank has nothing to do, and joins in
            self._tree.push(SumNode(0, share.number, self._take()))
        if share.last:
            self._finish(share.step)
            self._buffers.share()

    def _take(self) -> Gradients:
        taken: Gradients = []
        for parameter in self._parameters:
            taken.append(parameter.grad)
            parameter.grad = None
        return taken

    def _finish(self, step: int) -> None:
        self._take()
        alone = self._ranks.world_size == 1
        total = self._tree.total() if alone else self._total_of_all(self._loader.ranges(step))
        for parameter, before, gradient in zip(self._parameters, self._before, total, strict=True):
            # What was there before the step stays, as with autograd: zeros if they were set to 0.
            parameter.grad = gradient if before is None else before
            if before is not None and gradient is not None:
                before.add_(gradient)
        self._begun, self._before, self._tree = False, [], TreeSum(_add)
        self._by_hand.tell([p for p in self._by_hand.candidates if p.grad is not None])

    def _total_of_all(self, ranges: Sequence[range]) -> Gradients:
        nodes_of_ranks = [whole_nodes(leaves) for leaves in ranges]
        mine = [node.value for node in self._tree.nodes]
        total: Gradients = []
        for bucket in cut_into_buckets(self._parameters):
            place = slice(len(total), len(total) + len(bucket))
            flat = self._sum_of_ranks(
                [flatten(bucket, gradients[place]) for gradients in mine], nodes_of_ranks, bucket
            )
            total += [
                None if gradient is None else own_copy(parameter, gradient)
                for parameter, gradient in zip(bucket, unflatten(bucket, flat), strict=True)
            ]
        return total

    def _sum_of_ranks(
        self,
        mine: Sequence[torch.Tensor],
        nodes_of_ranks: Sequence[Sequence[SumNode[None]]],
        bucket: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Return the flat sum over all nodes; `mine` are the flat values of this rank's."""
        world_size = self._ranks.world_size
        length = sum(parameter.numel() for parameter in bucket) + len(bucket)
        columns = -(-length // world_size)
        rows = bucket[0].new_zeros((len(mine), world_size * columns))
        for row, flat in zip(rows, mine, strict=True):
            row[:length] = flat
        by_owner = rows.view(len(mine), world_size, columns).transpose(0, 1)
        counts = [len(nodes) for nodes in nodes_of_ranks]
        received = self._ranks.exchange(by_owner, counts)
        tree: TreeSum[torch.Tensor] = TreeSum(torch.Tensor.add_)
        every_node = (node for nodes in nodes_of_ranks for node in nodes)
        for node, row in zip(every_node, received, strict=True):
            tree.push(SumNode(node.level, node.number, row))
        return self._ranks.gather(tree.total())[:length]


def _add(left: Gradients, right: Gradients) -> Gradients:
    """Return the sum, in the memory of `left`; a gradient that is not there adds nothing."""
    for ours, more in zip(left, right, strict=True):
        if ours is not None and more is not None:
            ours.add_(more)
    return [more if ours is None else ours for ours, more in zip(left, right, strict=True)]


def _refuse_what_depends_on_ranks(
    modules: Sequence[torch.nn.Module], parameters: Sequence[torch.Tensor]
) -> None:
    parts = [part for module in modules for part in module.modules()]
    sharded = any(map(is_sharded, modules)) or any(map(is_fsdp1_module, parts))
    if sharded or any(map(is_dtensor, parameters)):
        raise UsageError(
            'exact="bitwise" needs the whole model on every rank, but parameters are sharded',
            hint="use DistributedDataParallel or the plain module, or leave exact out",
        )
    for module in modules:
        for name, part in module.named_modules():
            if part.training and _sees_more_than_its_micro_batch(part):
                raise UsageError(
                    f'exact="bitwise": {name or "the model"} ({type(part).__name__}) keeps'
                    " statistics of all that its rank sees, so they depend on the ranks",
                    hint="use GroupNorm or LayerNorm, or freeze it with eval()",
                )


def _sees_more_than_its_micro_batch(part: torch.nn.Module) -> bool:
    tracks = getattr(part, "track_running_stats", False) is True  # BatchNorm, InstanceNorm
    return tracks or isinstance(part, torch.nn.SyncBatchNorm)
