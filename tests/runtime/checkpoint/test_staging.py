from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
import xxhash
from torch import nn

from spotguard.errors import CheckpointError
from spotguard.events.states import CheckpointKind
from spotguard.runtime.checkpoint import staging
from spotguard.runtime.checkpoint.staging import Plan, StagingBuffer, WeightsChanged, live_views
from spotguard.runtime.state.tree import Leaf
from spotguard.testing import FaultyStore, MemoryStore
from tests.runtime.harness.lab import Rank, adapters, next_attempt, raw, same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Training:
    """A model with buffers, its optimizer, an EMA that no optimizer knows, and a count."""

    def __init__(self) -> None:
        self.first = nn.Linear(4, 8)
        self.model = nn.Sequential(self.first, nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.ema = nn.Linear(4, 8)
        self.seen: dict[str, Any] = {"count": 0, "tensor": torch.zeros(3)}

    @property
    def tracked(self) -> dict[str, Any]:
        """Return what `run.track` would be given."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "ema": self.ema,
            "seen": self.seen,
        }

    def forward_and_backward(self) -> None:
        """Change what a step changes before its optimizer: buffers, counts, gradients."""
        self.model(torch.randn(6, 4)).sum().backward()
        self.seen["count"] += 1
        self.seen["tensor"] += 1
        with torch.no_grad():
            self.ema.weight.mul_(0.5)

    def step(self) -> None:
        """Take a whole step."""
        self.forward_and_backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """Return a copy of everything."""
        return {
            "model": {k: v.clone() for k, v in self.model.state_dict().items()},
            "optimizer": [
                {k: v.clone() for k, v in state.items()} for state in self.optimizer.state.values()
            ],
            "ema": self.ema.weight.clone(),
            "seen": {"count": self.seen["count"], "tensor": self.seen["tensor"].clone()},
        }


@pytest.fixture
def slow_copy(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Copies that were put off wait until the event is set; those at once do not."""
    go = threading.Event()
    copy_rest = staging.Staged.copy_rest

    def held(staged: staging.Staged, *, hashing: bool = False) -> None:
        assert go.wait(10)
        copy_rest(staged, hashing=hashing)

    monkeypatch.setattr(staging.Staged, "copy_rest", held)
    yield go
    go.set()


def begin(rank: Rank, step: int, training: Training) -> None:
    """Begin a save that overlaps with the next step."""
    capture = rank.saver.capture(step, CheckpointKind.PERIODIC, adapters(training.tracked), {})
    rank.saver.save_in_background(capture, overlap=True)


def restored(store: Any) -> dict[str, Any]:
    """Return the state that the next attempt starts from."""
    fresh = Training()
    fresh.step()
    next_attempt(store, **fresh.tracked)
    return fresh.state()


def test_the_next_step_runs_while_weights_are_copied(slow_copy: threading.Event) -> None:
    """Forward and backward change buffers, counts and an EMA; the save has them as they were.

    The optimizer waits for the copy of what it is about to change, and for nothing else.
    """
    training, rank = Training(), Rank()
    rank.start()
    training.step()
    expected = training.state()
    begin(rank, 1, training)
    training.forward_and_backward()
    stepped = threading.Event()

    def optimizer_step() -> None:
        rank.saver.wait_copied()  # what the job's optimizer hook does
        training.optimizer.step()
        stepped.set()

    optimizing = threading.Thread(target=optimizer_step)
    optimizing.start()
    assert not stepped.wait(0.05), "weights were changed while they were copied"
    slow_copy.set()
    optimizing.join(10)
    rank.saver.wait()

    assert rank.failed == []
    assert same(restored(rank.store), expected)


def test_the_wait_of_the_optimizer_is_measured(slow_copy: threading.Event) -> None:
    """What a save holds up the loop includes the optimizer's wait: the schedule needs the truth."""
    store, waited = FaultyStore(MemoryStore()), threading.Event()

    def hold(_key: str) -> None:
        assert waited.wait(10)

    store.before("put", hold, key_contains="manifest")
    training, rank = Training(), Rank(store)
    rank.start()
    training.step()
    begin(rank, 1, training)
    threading.Timer(0.05, slow_copy.set).start()
    rank.saver.wait_copied()
    rank.saver.wait_copied()  # nothing left to wait for
    waited.set()
    rank.saver.wait()

    [saved] = rank.saved
    assert saved.stall_s >= 0.04


def _untracked_fused_step(weight: torch.Tensor) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.5, fused=True).step()


def _numpy_write(weight: torch.Tensor) -> None:
    weight.detach().numpy()[:] = 0


@pytest.mark.parametrize(
    "write",
    [
        torch.Tensor.zero_,
        lambda weight: weight.data.zero_(),
        _numpy_write,
        _untracked_fused_step,
    ],
)
def test_weights_changed_behind_our_back_are_never_saved(
    write: Callable[[torch.Tensor], Any], slow_copy: threading.Event
) -> None:
    """A script that changes weights without its optimizer: told, not committed, and no overlap.

    Also by writes that torch does not count.
    """
    training, rank = Training(), Rank()
    rank.start()
    training.step()
    begin(rank, 1, training)
    held = threading.Thread(target=rank.saver.wait)
    held.start()
    with torch.no_grad():
        write(training.first.weight)
    slow_copy.set()
    held.join(10)
    [(step, problem)] = rank.failed
    assert step == 1
    assert isinstance(problem, WeightsChanged)
    assert rank.saved == []

    expected = training.state()
    slow_copy.clear()
    begin(rank, 2, training)
    training.optimizer.zero_grad(set_to_none=True)
    rank.saver.wait_copied()  # at once: everything was copied before it began
    with torch.no_grad():
        training.first.weight.fill_(5)
    rank.saver.wait()
    assert same(restored(rank.store), expected)


def test_an_emergency_save_does_not_wait_for_an_older_one(slow_copy: threading.Event) -> None:
    """With a slow save in flight the newer state is stored; the older one gives way, unblamed."""
    store = FaultyStore(MemoryStore())
    training, rank = Training(), Rank(store)
    rank.start()
    training.step()
    begin(rank, 1, training)
    threading.Timer(0.05, slow_copy.set).start()
    rank.saver.wait_copied()
    training.step()
    expected = training.state()
    capture = rank.saver.capture(2, CheckpointKind.EMERGENCY, adapters(training.tracked), {})
    saved = rank.saver.save_now(capture)

    assert saved is not None
    assert saved.step == 2
    assert rank.failed == []
    assert same(restored(store.inner), expected)


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Leaf]:
    """Return tensors to stage."""
    return [Leaf(f"t{i}", torch.randn(shape).to(dtype)) for i, shape in enumerate(shapes)]


def test_the_layout_is_made_once() -> None:
    """For tensors of the same names and forms the plan stays; any change makes a new one."""
    plan = Plan.of(leaves((3,), (4, 5)), {}, None)

    assert Plan.of(leaves((3,), (4, 5)), {}, plan).layout is plan.layout
    assert Plan.of(leaves((3,), (5, 4)), {}, plan).layout is not plan.layout
    bfloat16 = leaves((3,), (4, 5), dtype=torch.bfloat16)
    assert Plan.of(bfloat16, {}, plan).layout is not plan.layout
    assert Plan.of(leaves((3,)), {}, plan).layout is not plan.layout


def test_leaves_that_are_not_worth_it_are_not_held() -> None:
    """A plan holds the tensors that it was made for only if the next save has the very same."""
    tensors = leaves((3,))
    assert Plan.of(tensors, {}, None).leaves is tensors
    assert Plan.of(tensors, {}, None, keep=False).leaves == []


def test_several_threads_share_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits helps: large tensors are shared out in chunks, and each byte is copied."""
    monkeypatch.setattr(staging, "_CHUNK_BYTES", 256)
    tensors = leaves((1000,), (3, 7), (), (500,))
    tensors.append(Leaf("turned", torch.randn(40, 30).t()))
    for leaf in tensors:
        leaf.steady = True
    staged = StagingBuffer().stage(tensors, plan := Plan.of(tensors, {}, None), overlap=True)
    threads = [threading.Thread(target=staged.copy_rest) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    staged.wait_ready()
    assert bytes(staged.data) == b"".join(map(bytes, live_views(tensors, plan.layout)))


def test_the_buffer_holds_the_file_byte_by_byte() -> None:
    """Staged bytes and live ones are the same, in the order of the file."""
    tensors = leaves((7,), (0, 2), (64, 3), (), (5, 5))
    tensors.append(Leaf("flag", torch.tensor([True, False, True])))
    tensors.append(Leaf("turned", torch.arange(6.0).view(2, 3).t()))
    plan = Plan.of(tensors, {}, None)
    staged = StagingBuffer().stage(tensors, plan, overlap=True)
    assert staged.copied.is_set(), "nothing here is steady"

    assert bytes(staged.data) == b"".join(map(bytes, live_views(tensors, plan.layout)))
    assert len(staged.data) == sum(len(raw(leaf.tensor)) for leaf in tensors)


def test_pieces_hashed_while_they_are_copied_are_those_of_the_file() -> None:
    """What the copier hashes on its way is what anyone would find in the bytes of the file.

    Also where a piece holds bytes that were copied at once, and at the shorter end of the data.
    """
    tensors = leaves((300_000,), (5,), (700_000,), (3, 7), (1_300_001,))
    for leaf in tensors[::2]:
        leaf.steady = True
    plan = Plan.of(tensors, {}, None)
    staged = StagingBuffer().stage(tensors, plan, overlap=True)
    staged.copy_rest(hashing=True)
    staged.wait_ready()

    piece, size = plan.layout.piece_bytes, len(staged.data)
    ends = {min(start + piece, size): start for start in range(0, size, piece)}
    assert staged.hashes == {
        end: xxhash.xxh3_128_hexdigest(staged.data[start:end]) for end, start in ends.items()
    }


def test_pieces_larger_than_what_is_copied_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of more than 16 GB have them: no hash of a part may pass for that of the whole."""
    monkeypatch.setattr(staging, "_CHUNK_BYTES", 1 << 19)
    tensors = leaves((300_000,), (700_000,), (1_300_001,))
    for leaf in tensors:
        leaf.steady = True
    plan = Plan.of(tensors, {}, None)
    assert plan.layout.piece_bytes > 1 << 19
    staged = StagingBuffer().stage(tensors, plan, overlap=True)
    staged.copy_rest(hashing=True)
    staged.wait_ready()

    for end, found in staged.hashes.items():
        piece = staged.data[(end - 1) // plan.layout.piece_bytes * plan.layout.piece_bytes : end]
        assert found == xxhash.xxh3_128_hexdigest(piece)


def test_nothing_is_hashed_beside_a_tensor_that_is_copied_as_one() -> None:
    """A tensor that does not lie in one piece may end in a later chunk, copied by another."""
    tensors = leaves((300_000,), (700_000,))
    tensors.append(Leaf("turned", torch.randn(1300, 1000).t()))
    for leaf in tensors:
        leaf.steady = True
    staged = StagingBuffer().stage(tensors, Plan.of(tensors, {}, None), overlap=True)
    staged.copy_rest(hashing=True)

    assert not staged.hashes


def test_nothing_is_hashed_while_somebody_waits_for_the_copy() -> None:
    """An optimizer that waits gets the copier's whole help; its hashes can be made later."""
    tensors = leaves((300_000,), (700_000,), (2_000_000,))
    for leaf in tensors:
        leaf.steady = True
    staged = StagingBuffer().stage(tensors, Plan.of(tensors, {}, None), overlap=True)
    chunks = staged._left
    staged._left = iter(())  # it comes too late to copy anything itself
    staged.copy_rest()
    staged._left = chunks
    staged.copy_rest(hashing=True)

    assert staged.copied.is_set()
    assert not staged.hashes


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork beside torch's threads
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can leave memory out of a fork")
def test_a_forked_worker_costs_the_buffer_nothing() -> None:
    """A worker sees zeros in the buffer's place, so no page of it is ever kept twice."""
    tensors = leaves((100_000,))
    staged = StagingBuffer().stage(tensors, Plan.of(tensors, {}, None), overlap=False)
    assert any(staged.data)
    child = os.fork()
    if not child:
        os._exit(any(staged.data))

    assert os.waitpid(child, 0)[1] == 0


def test_nobody_writes_to_the_buffer_for_a_save_that_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store that refuses at once ends a save while it is copied; the next one has the buffer.

    What lies elsewhere in that one is not written over by the copies that are still under way.
    """
    monkeypatch.setattr(staging, "_CHUNK_BYTES", 64)
    begun, go = threading.Event(), threading.Event()
    run = staging.Chunk.run

    def slow(chunk: staging.Chunk) -> None:
        begun.set()
        assert go.wait(10)
        run(chunk)

    first, second = leaves((16,), (16,), (16,)), leaves((8,), (48,))
    for leaf in first:
        leaf.steady = True
    buffer = StagingBuffer()
    old = buffer.stage(first, Plan.of(first, {}, None), overlap=True)
    monkeypatch.setattr(staging.Chunk, "run", slow)
    copier = threading.Thread(target=old.copy_rest)
    copier.start()
    assert begun.wait(10)
    monkeypatch.setattr(staging.Chunk, "run", run)
    threading.Timer(0.05, go.set).start()
    plan = Plan.of(second, {}, None)
    new = buffer.stage(second, plan, overlap=False)
    copier.join(10)

    assert bytes(new.data) == b"".join(map(bytes, live_views(second, plan.layout)))
    with pytest.raises(CheckpointError, match="gave way to a later one"):
        old.wait_ready()


def test_a_state_that_is_copied_holds_no_tensor() -> None:
    """On a GPU, a step that makes new weights would have its memory taken twice."""
    tensors = [Leaf("turned", torch.randn(40, 30).t(), steady=True)]
    gone = weakref.ref(tensors[0].tensor)
    plan = Plan.of(tensors, {}, None, keep=False)
    staged = StagingBuffer().stage(tensors, plan, overlap=True)
    staged.copy_rest()
    staged.wait_ready()
    tensors.clear()

    assert gone() is None


def test_the_front_can_be_written_while_the_end_is_copied(
    monkeypatch: pytest.MonkeyPatch, slow_copy: threading.Event
) -> None:
    """`wait_ready` lets go of the bytes before the first one that is still to be copied."""
    monkeypatch.setattr(staging, "_CHUNK_BYTES", 64)
    tensors = leaves((16,), (16,), (16,))
    tensors[1].steady = tensors[2].steady = True
    plan = Plan.of(tensors, {}, None)
    staged = StagingBuffer().stage(tensors, plan, overlap=True)
    staged.wait_ready(64)
    copier = threading.Thread(target=staged.copy_rest, name="spotguard-copy")
    copier.start()
    waiting = threading.Thread(target=staged.wait_ready, args=(128,))
    waiting.start()
    waiting.join(0.02)
    assert waiting.is_alive(), "bytes were let go before they were there"
    assert not staged.copied.is_set()
    slow_copy.set()
    for thread in (waiting, copier):
        thread.join(10)
    staged.wait_ready()

    assert bytes(staged.data) == b"".join(raw(leaf.tensor) for leaf in tensors)
