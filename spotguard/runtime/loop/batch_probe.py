"""`micro_batch_size="auto"`: how many samples fit into the memory of the smallest device.

It is tried once, before the first step: forward, backward, the optimizers' step, and once more
forward and backward, with the moments there; then what a step is cut into beside it, since other
shapes take memory of their own. All ranks try the same size at the same time, and it fits if it
fits for all of them. Afterwards weights, moments, gradients and random states are what they were.
A resume keeps the size, unless its smallest device is another.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import tempfile
from typing import TYPE_CHECKING, Any

import torch

from spotguard.errors import EnvironmentFailure, UsageError
from spotguard.runtime.data.batch_search import Found, largest_that_fits
from spotguard.runtime.distributed.gradients import run_backward
from spotguard.runtime.distributed.wrappers import parameters_of
from spotguard.runtime.process.memory import (
    give_back_what_is_freed,
    in_its_own_thread,
    is_lack_of_memory,
    memory_of,
)
from spotguard.runtime.process.outside_loop import outside_loop
from spotguard.runtime.state.filling import fill, flat_bytes
from spotguard.runtime.state.rng import capture_random_states, restore_random_states
from spotguard.runtime.state.sharding import is_dtensor
from spotguard.runtime.state.tracked import random_accessors
from spotguard.runtime.state.weight_witness import TensorSample

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from spotguard.runtime.data.loader import ElasticLoader, Share
    from spotguard.runtime.distributed.collectives import ProcessGroup
    from spotguard.runtime.distributed.gradients import GradientSync

log = logging.getLogger("spotguard")

_OF_THREADS_BYTES = 128 << 20
_MOST_FROZEN_BYTES = 1 << 30
"""So much of what has no gradient is kept and put back; a larger base is only looked at."""


class BatchProbe:
    """Finds the size for one attempt; used once."""

    def __init__(
        self,
        loader: ElasticLoader,
        values: Sequence[Any],
        gradients: GradientSync,
        ranks: ProcessGroup,
        device: torch.device,
    ) -> None:
        """`values` are all tracked objects."""
        if gradients.meets_in_forward:
            raise UsageError(
                'run.loader: micro_batch_size="auto" cannot try FSDP2 and SyncBatchNorm, whose'
                " ranks wait for each other: one without memory would keep the others",
                hint="give micro_batch_size a number",
            )
        self._loader = loader
        self._values = values
        self._gradients = gradients
        self._ranks = ranks
        self._device = device
        self._optimizers = [v for v in values if isinstance(v, torch.optim.Optimizer)]

    def settle(self, remembered: Any, first: int) -> str | None:
        """Give the loader its size, for steps from `first` on; return what there is to tell.

        `remembered` is what the checkpoint says, as `loader.remembered` was.

        Raises:
            EnvironmentFailure: not even one sample fits.
        """
        limit = self._smallest_memory()
        device = {"kind": self._device.type, "memory_bytes": limit}
        if limit is not None and self._device.type == "cpu":
            give_back_what_is_freed()  # the steps of a resume, too, are to take what was tried
        if _is_of(remembered, device):
            self._loader.settle(remembered["size"], device)
            return None
        most = self._largest_share()
        if limit is None:
            self._loader.settle(most, device)
            return f"micro-batches of {most} samples: no limit of this CPU's memory is known"
        with self._trying():
            found = self._search(most, first)
        if not found.size:
            raise EnvironmentFailure(
                'run.loader: micro_batch_size="auto": not even one sample fits into the memory',
                hint="shard the model (FSDP2), recompute activations, or take a larger GPU",
            )
        size = self._without_single(found.size)
        self._loader.settle(size, device)
        told = ", ".join(f"{each} {'fits' if fits else 'does not'}" for each, fits in found.tried)
        return f"micro-batches of {size} samples (tried: {told})"

    def settle_untried(self) -> None:
        """Give the loader the most samples that a rank has of a step, whether they fit or not."""
        self._loader.settle(self._largest_share(), {"kind": self._device.type})

    def _largest_share(self) -> int:
        """Return the samples of a step that a rank has at most, if they are shared out evenly."""
        return -(-self._loader.global_batch_size // self._ranks.world_size)

    def _without_single(self, size: int) -> int:
        """Return a size that leaves no single sample: batch normalisation has no variance of it."""
        while size > 2 and self._loader.global_batch_size % size == 1:
            size -= 1
        return size

    def _smallest_memory(self) -> int | None:
        """Return the bytes of the rank that has least; None if no limit is known anywhere."""
        ranks = self._ranks
        every = torch.zeros(ranks.world_size, dtype=torch.int64, device=self._device)
        every[ranks.rank] = memory_of(self._device) or 0
        if ranks.world_size > 1:
            ranks.add_up(every)()
        return min((size for size in every.tolist() if size), default=None)

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        quiet = self._gradients.without_buffers()  # DDP's own is for all ranks or for none
        with put_back(self._values), outside_loop.warm_up(), quiet:
            yield

    def _search(self, most: int, first: int) -> Found:
        return largest_that_fits(most, lambda size: self._fits_all(size, first))

    def _fits_all(self, size: int, first: int) -> bool:
        """Try a size on all ranks; return whether it fits for each of them."""
        failed = torch.tensor([0.0 if self._fits(size, first) else 1.0], device=self._device)
        if self._ranks.world_size > 1:
            self._ranks.add_up(failed)()
        return not float(failed)

    def _fits(self, size: int, first: int) -> bool:
        try:
            kept_free = self._kept_free()
            self._train(size, first)
            del kept_free
        except (RuntimeError, MemoryError) as problem:  # torch's own for a GPU is one, too
            if not is_lack_of_memory(problem):
                raise
        else:
            return True
        finally:
            self._let_go()
        return False

    def _kept_free(self) -> torch.Tensor | None:
        """Return memory that is to be left where the process has no more than its device."""
        if self._device.type != "cpu":
            return None
        return torch.empty(self._kept_free_bytes(), dtype=torch.uint8)

    def _kept_free_bytes(self) -> int:
        """Return what a CPU needs: what is saved is copied beside the training; threads' stacks."""
        modules = [value for value in self._values if isinstance(value, torch.nn.Module)]
        state = sum(t.nbytes for t in _tensors(modules, self._optimizers))
        return state + _OF_THREADS_BYTES

    def _train(self, size: int, first: int) -> None:
        share = self._loader.share_to_try(first, size)
        self._pass(self._begun(share))
        for optimizer in self._optimizers:
            optimizer.step()
        self._pass(self._begun(share))
        rest = self._loader.global_batch_size % size
        if rest > 1:
            self._forward_backward(self._begun(self._loader.share_to_try(first, rest)))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _begun(self, share: Share) -> Any:
        """Return the samples of a micro-batch, whose forward pass is to come."""
        self._gradients.begin(share)
        self._loader.seed_training(share)
        return self._loader.batch_of(share)

    def _pass(self, batch: Any) -> None:
        """Run forward and backward of as many samples as are tried."""
        self._forward_backward(batch)

    def _forward_backward(self, batch: Any) -> None:
        probe = self._loader.probe
        assert probe is not None
        if self._device.type == "cpu":
            in_its_own_thread(lambda: run_backward(probe(batch), 1.0))
        else:
            run_backward(probe(batch), 1.0)

    def _let_go(self) -> None:
        for parameter in parameters_of(self._optimizers):
            parameter.grad = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


@contextlib.contextmanager
def put_back(values: Sequence[Any]) -> Iterator[None]:
    """Have modules, optimizers and generators be afterwards what they were before, bit by bit.

    What may change is kept in a temporary file, so that it takes none of the memory that is tried.
    """
    modules = [value for value in values if isinstance(value, torch.nn.Module)]
    optimizers = [value for value in values if isinstance(value, torch.optim.Optimizer)]
    buffers = [
        (part, name, buffer)
        for module in modules
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    frozen = [p.detach() for m in modules for p in _once(m.parameters()) if not p.requires_grad]
    few = sum(tensor.nbytes for tensor in frozen) <= _MOST_FROZEN_BYTES
    watched = TensorSample([] if few else frozen)
    watched.take()
    tensors = (*_tensors(modules, optimizers), *(frozen if few else ()))
    held = {(_local(t).data_ptr(), t.dtype, t.shape): t for t in tensors if t.numel()}
    gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    gradients.update({id(p): (p, p.grad) for m in modules for p in m.parameters()})
    gradients.update({id(p): (p, p.grad) for p in parameters_of(optimizers)})
    states = [(o, _shallow(o.state), _groups(o), _plain_attributes(o)) for o in optimizers]
    generators = [
        (pair[1], value, copy.deepcopy(pair[0](value)))
        for value in values
        if (pair := random_accessors(value)) is not None
    ]
    random_states = capture_random_states()
    with tempfile.TemporaryFile(prefix="spotguard-probe-") as file:
        for tensor in held.values():
            file.write(_bytes(tensor))
        for parameter, _ in gradients.values():
            parameter.grad = None
        try:
            yield
        finally:
            file.seek(0)
            for part, name, buffer in buffers:  # a module may put another one in its place
                setattr(part, name, buffer)
            with torch.no_grad():
                for tensor in held.values():
                    _fill(tensor, file.read(_local(tensor).nbytes))
            for optimizer, state, groups, attributes in states:
                optimizer.state.clear()
                optimizer.state.update(state)
                for group, before in zip(optimizer.param_groups, groups, strict=True):
                    group.update(before)
                vars(optimizer).update(attributes)
            for parameter, gradient in gradients.values():
                parameter.grad = gradient
            for write, value, state in generators:
                write(value, state)
            restore_random_states(random_states)
        if watched.changed():
            raise UsageError(
                'run.loader: micro_batch_size="auto": the model changes parameters in its forward '
                "pass that have no gradient, so that trying sizes leaves its traces",
                hint="give micro_batch_size a number",
            )


def _tensors(
    modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> Iterator[torch.Tensor]:
    """Yield what an optimizer's step may change in place, and all buffers."""
    for module in modules:
        yield from (p.detach() for p in _once(module.parameters()) if p.requires_grad)
        yield from module.buffers()
    for optimizer in optimizers:
        yield from _once(parameters_of((optimizer,)))
        for entries in optimizer.state.values():
            if isinstance(entries, dict):
                yield from (v for v in entries.values() if isinstance(v, torch.Tensor))


def _once(tensors: Any) -> Iterator[torch.Tensor]:
    yield from {id(tensor): tensor for tensor in tensors}.values()


def _shallow(state: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: dict(value) if isinstance(value, dict) else value for key, value in state.items()}


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _plain_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    kinds = (bool, int, float, str, type(None))
    return {key: value for key, value in vars(optimizer).items() if isinstance(value, kinds)}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def _bytes(tensor: torch.Tensor) -> bytes:
    return flat_bytes(_local(tensor).cpu()).numpy().tobytes()


def _fill(tensor: torch.Tensor, raw: bytes) -> None:
    local = _local(tensor).detach()
    if raw and _bytes(local) != raw:  # what is the same keeps its version, too
        flat = torch.frombuffer(bytearray(raw), dtype=local.dtype)
        fill(local, flat.view(local.shape))


def _is_of(remembered: Any, device: dict[str, Any]) -> bool:
    return (
        isinstance(remembered, dict)
        and isinstance(remembered.get("size"), int)
        and remembered["size"] > 0
        and {key: remembered.get(key) for key in device} == device
    )
