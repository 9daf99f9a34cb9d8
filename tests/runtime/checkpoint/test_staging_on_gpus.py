"""The staging buffer and the GPUs of one process, which are played here: no test needs one.

A GPU does what was enqueued on a stream only once somebody waits for that stream, which is as late
as a real one may be. A copy is enqueued, as torch does it, on the current stream of its source's
GPU, whichever stream is current on the others.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from spotguard.runtime.checkpoint import staging
from spotguard.runtime.checkpoint.staging import Plan, StagingBuffer
from spotguard.runtime.state.tree import Leaf
from tests.runtime.harness.lab import raw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Stream:
    """What was enqueued on one GPU's stream and is not done."""

    def __init__(self, device: Any) -> None:
        self.device = torch.device(device)
        self.queue: list[Callable[[], object]] = []
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        """Have what comes later wait for what the other stream has to do now."""
        self.waited_for.append(other)
        self.queue.append(other.synchronize)

    def synchronize(self) -> None:
        """Do all that was enqueued."""
        while self.queue:
            self.queue.pop(0)()


class Gpus:
    """Which stream is current on which GPU."""

    def __init__(self) -> None:
        self.made: list[Stream] = []
        self.current: dict[torch.device, Stream] = {}
        self.of_training: dict[torch.device, Stream] = {}

    def make(self, device: Any) -> Stream:
        """Return a new stream of a GPU."""
        self.made.append(Stream(device))
        return self.made[-1]

    def current_on(self, device: Any) -> Stream:
        """Return the stream on which a GPU's work goes now: without another word the training's."""
        device = torch.device(device)
        own = self.of_training.setdefault(device, Stream(device))
        return self.current.get(device, own)

    @contextlib.contextmanager
    def entered(self, stream: Stream) -> Iterator[None]:
        """Have a stream be current on its own GPU, and on no other."""
        before = self.current_on(stream.device)
        self.current[stream.device] = stream
        yield
        self.current[stream.device] = before


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Play the GPUs of a process."""
    played = Gpus()
    memory = staging._memory
    monkeypatch.setattr(torch.cuda, "Stream", played.make)
    monkeypatch.setattr(torch.cuda, "stream", played.entered)
    monkeypatch.setattr(torch.cuda, "current_stream", played.current_on)
    monkeypatch.setattr(staging, "_memory", lambda size, *, pinned: memory(size, pinned=False))
    OnGpu.gpus = played
    return played


class OnGpu(torch.Tensor):
    """A tensor that says it lies on a GPU."""

    gpus: Gpus
    place: torch.device

    is_cuda = True
    is_cpu = False

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Return the GPU."""
        return self.place

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.copy_:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        target, source = args
        values = source.as_subclass(torch.Tensor)
        stream = cls.gpus.current_on(source.place)
        stream.queue.append(lambda: target.copy_(values))
        if not (kwargs or {}).get("non_blocking"):
            stream.synchronize()
        return target


def on_gpu(number: int, *shape: int) -> OnGpu:
    """Return random numbers on a GPU."""
    tensor = torch.randn(shape).as_subclass(OnGpu)
    tensor.place = torch.device("cuda", number)
    return tensor


def spread_state() -> list[Leaf]:
    """Return the leaves of a model whose layers lie on three GPUs, and of what is on the CPU."""
    tensors = [on_gpu(0, 5), on_gpu(1, 3, 4), on_gpu(0, 2, 2), on_gpu(2, 7), torch.randn(3, 2).t()]
    return [Leaf(f"t{number}", tensor) for number, tensor in enumerate(tensors)]


def bytes_in_order(leaves: list[Leaf], plan: Plan) -> bytes:
    """Return what the file is to hold."""
    tensors = [leaves[index].tensor.as_subclass(torch.Tensor) for index in plan.layout.order]
    return b"".join(map(raw, tensors))


@pytest.mark.parametrize("steady", [True, False])
def test_a_model_that_is_spread_over_gpus_is_copied_whole(gpus: Gpus, steady: bool) -> None:
    """Each GPU's tensors are there when the copy is told to be, at once or put off."""
    leaves = spread_state()
    for leaf in leaves:
        leaf.steady = steady
    plan, buffer = Plan.of(leaves, {}, None), StagingBuffer()
    for _ in range(2):  # a second save finds the first one's bytes in the buffer
        staged = buffer.stage(leaves, plan, overlap=True)
        staged.copy_rest(hashing=True)
        staged.wait_ready()
        assert bytes(staged.data) == bytes_in_order(leaves, plan)
        for leaf in leaves:
            leaf.tensor.as_subclass(torch.Tensor).add_(1)


def test_a_copy_comes_after_what_each_gpu_has_still_to_do(gpus: Gpus) -> None:
    """The last optimizer step may be under way on every one of them when a save begins."""
    leaves = spread_state()
    for number in range(3):
        device = torch.device("cuda", number)
        mine = [leaf.tensor for leaf in leaves if leaf.tensor.device == device]
        assert mine
        for tensor in mine:
            double = partial(tensor.as_subclass(torch.Tensor).mul_, 2)
            gpus.current_on(device).queue.append(double)
    expected = {
        leaf.name: leaf.tensor.as_subclass(torch.Tensor) * (2 if leaf.tensor.is_cuda else 1)
        for leaf in leaves
    }
    plan = Plan.of(leaves, {}, None)
    staged = StagingBuffer().stage(leaves, plan, overlap=False)

    names = [leaves[index].name for index in plan.layout.order]
    assert bytes(staged.data) == b"".join(raw(expected[name]) for name in names)


def test_one_gpu_has_one_stream(gpus: Gpus) -> None:
    """Nearly all processes have one GPU, where copies go one after the other as they lie."""
    leaves = [Leaf(f"t{number}", on_gpu(1, 4)) for number in range(5)]
    buffer = StagingBuffer()
    buffer.stage(leaves, plan := Plan.of(leaves, {}, None), overlap=False)
    buffer.stage(leaves, plan, overlap=False)

    [stream] = gpus.made
    assert stream.device == torch.device("cuda", 1)
    assert stream.waited_for == [gpus.current_on("cuda:1")] * 2
