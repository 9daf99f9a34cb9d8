"""`micro_batch_size="auto"` finds what fits, in few tries, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from spotguard.errors import UsageError
from spotguard.runtime.data.batch_search import MOST_TRIES, largest_that_fits
from spotguard.runtime.loop import batch_probe, batch_trial
from spotguard.runtime.loop.batch_probe import BatchProbe, put_back
from spotguard.runtime.loop.batch_trial import BatchTrial
from tests.runtime.harness.lab import raw

if TYPE_CHECKING:
    from tests.runtime.harness.processes import Jobs

AUTO = Path(__file__).parents[1] / "jobs" / "levers" / "auto_batch.py"


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64, 100, 255, 1000, 1025, 4096, 10_000])
def test_most_of_what_fits_is_found_in_ten_tries(most: int) -> None:
    """For any limit: at least 80 % of the largest that fits, and never more than that."""
    step = max(1, most // 700)
    for limit in [*range(1, min(most, 300) + 1), *range(300, most + 1, step), most]:
        found = largest_that_fits(most, lambda size, limit=limit: size <= limit)  # type: ignore[misc]
        assert 0.8 * limit <= found.size <= limit
        assert len(found.tried) <= MOST_TRIES
        assert len(set(found.tried)) == len(found.tried), "a size is tried once"


def test_where_nothing_fits_that_is_found() -> None:
    """A single sample is the last that is tried."""
    for most in (1, 5, 1000, 10_000):
        found = largest_that_fits(most, lambda size: False)
        assert found.size == 0
        assert found.tried[-1] == (1, False)


def net() -> nn.Module:
    """Return a net with statistics, dropout and a frozen layer."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    made[3].requires_grad_(False)
    return made


def all_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Return all bits of a training state."""
    moments = [
        (raw(v) if isinstance(v, torch.Tensor) else v)
        for p in model.parameters()
        for v in optimizer.state.get(p, {}).values()
    ]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    grads = [None if p.grad is None else raw(p.grad) for p in model.parameters()]
    return (
        [raw(t) for t in model.state_dict().values()],
        moments,
        repr(groups),
        grads,
        len(optimizer.state),
        raw(torch.get_rng_state()),
        random.getstate(),
    )


@pytest.mark.parametrize("trained_before", [0, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_what_was_tried_leaves_nothing_behind(trained_before: int, fails: bool) -> None:
    """Weights, statistics, moments, gradients, groups and generators: all bits are as before."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    own = torch.Generator().manual_seed(3)
    drawn = torch.Generator().manual_seed(3)

    def train() -> None:
        model(torch.randn(6, 4)).square().mean().backward()
        optimizer.step()

    for _ in range(trained_before):
        train()
    versions = [p._version for p in model[3].parameters()]  # type: ignore[index]
    before = all_of(model, optimizer)
    values = [model, optimizer, own]
    try:
        with put_back(values):
            train()
            optimizer.param_groups[0]["lr"] = 7.0
            random.random()
            torch.rand(1, generator=own)
            train()
            assert all_of(model, optimizer) != before
            if fails:
                raise MemoryError
    except MemoryError:
        assert fails
    assert all_of(model, optimizer) == before
    assert torch.equal(torch.rand(3, generator=own), torch.rand(3, generator=drawn))
    assert [p._version for p in model[3].parameters()] == versions  # type: ignore[index]


class Codebook(nn.Module):
    """A net whose forward pass moves parameters that have no gradient."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.codes = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what it makes of `x`, and remember it."""
        found: torch.Tensor = self.layer(x) - self.codes
        with torch.no_grad():
            self.codes.add_(found.mean(0).sin() + 1)
        self.seen = self.seen + 1  # another one in its place
        return found


def test_what_a_forward_pass_moves_is_put_back() -> None:
    """Frozen parameters and buffers, though no optimizer knows of them."""
    model = Codebook()
    seen = model.seen
    with put_back([model]):
        model(torch.randn(3, 4))
        assert model.codes.abs().sum() > 0
    assert not model.codes.any()
    assert model.seen is seen
    assert not model.seen.any()


def test_a_large_base_that_moves_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not copied: what cannot be put back is refused, and what stands still is tried."""
    monkeypatch.setattr(batch_probe, "_MOST_FROZEN_BYTES", 0)
    still = net()
    with put_back([still]):
        still(torch.randn(3, 4))
    model = Codebook()
    with (
        pytest.raises(UsageError, match="changes parameters"),
        put_back([model]),
    ):
        model(torch.randn(3, 4))


Said = list[tuple[int, int, float]]
"""Of each step: the largest micro-batch, this rank's samples, and the weights' length."""


def trained(jobs: Jobs, world: int = 1, code: int = 0, **how: Any) -> tuple[Said, str]:
    """Run it; return what the first rank said."""
    ranks = jobs.start_ranks(world, script=AUTO, **how)
    assert {job.wait() for job in ranks} == {code}, "\n".join(job.said for job in ranks)
    lines = [line.split() for line in ranks[0].said.splitlines() if line.startswith("step ")]
    return [(int(a), int(b), float(c)) for _, _, a, b, c in lines], ranks[0].said


def fits(jobs: Jobs, size: int, room_mb: float, **how: Any) -> bool:
    """Return whether so many samples fit, tried alone in a process of its own.

    Two processes with the same room differ by what their threads' heaps hold: some dozen MB.
    """
    job = jobs.start(AUTO, TRY=size, ROOM_MB=room_mb, SPOTGUARD_RUN_ID=f"try-{size}", **how)
    job.wait()
    [line] = [line for line in job.said.splitlines() if line.startswith("tried ")]
    return line == "tried True"


class Tried(SimpleNamespace):
    """A loader and gradients of one rank, of a net whose samples are rows of four numbers."""

    global_batch_size = 64
    meets_in_forward = False
    world_size = 1
    without_buffers = staticmethod(contextlib.nullcontext)
    begin = seed_training = staticmethod(lambda share: None)
    share_to_try = staticmethod(lambda first, size: size)
    batch_of = staticmethod(lambda size: torch.zeros(size, 4))


def probed(kind: Any, probe: Any, *args: Any) -> Any:
    """Return a probe of this kind, with AdamW."""
    model = nn.Linear(4, 4)
    tried: Any = Tried(probe=probe(model))
    values = [model, torch.optim.AdamW(model.parameters())]
    return kind(*args, tried, values, tried, tried, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "is_memory"),
    [
        ("could not create a primitive", True),
        ("could not execute a primitive", True),
        ("std::bad_alloc", True),
        ("mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_what_libraries_say_for_want_of_memory(words: str, is_memory: bool) -> None:
    """A size that does not fit is no broken net."""

    def fails(model: nn.Module) -> Any:
        def probe(batch: torch.Tensor) -> torch.Tensor:
            if len(batch) > 7:
                raise RuntimeError(words)
            return model(batch).sum()  # type: ignore[no-any-return]

        return probe

    probe = probed(BatchProbe, fails)
    assert probe._fits(7, 0)
    with contextlib.nullcontext() if is_memory else pytest.raises(RuntimeError, match=words):
        assert not probe._fits(8, 0)


@pytest.mark.slow
def test_what_a_failed_try_breaks_in_its_thread_is_gone_with_it() -> None:
    """A kernel generator keeps its first error, by thread: what comes after it must not see it."""
    state = threading.local()

    def fails(model: nn.Module) -> Any:
        def probe(batch: torch.Tensor) -> torch.Tensor:
            assert torch.is_autocast_enabled("cpu"), "the script's own thread has it"
            if len(batch) > 7 or getattr(state, "is_broken", False):
                state.is_broken = True
                raise RuntimeError("could not create a primitive")
            return model(batch).sum()  # type: ignore[no-any-return]

        return probe

    probe = probed(BatchProbe, fails)
    with torch.autocast("cpu", torch.bfloat16):
        assert not probe._fits(8, 0)
        assert probe._fits(7, 0)
    assert not getattr(state, "is_broken", False)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "seen"), [(24, {24, 16}), (32, {32}), (21, {21}), (64, {64})])
def test_what_a_step_is_cut_into_beside_it_is_tried(size: int, seen: set[int]) -> None:
    """Of 64 samples in parts of 24 the last has 16; a single one is never left."""
    found = set()

    def notes(model: nn.Module) -> Any:
        def probe(batch: torch.Tensor) -> torch.Tensor:
            found.add(len(batch))
            return model(batch).sum()  # type: ignore[no-any-return]

        return probe

    probe = probed(BatchProbe, notes)
    assert probe._fits(size, 0)
    assert found == seen
    assert 64 % probe._without_single(size) != 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the heap of glibc is meant")
def test_what_was_freed_is_given_back() -> None:
    """Large tensors between small ones, which stay, count for no limit any more."""
    found = subprocess.run(
        [sys.executable, "-c", GIVEN_BACK], capture_output=True, text=True, check=True
    )
    assert int(found.stdout) < 40 << 20


GIVEN_BACK = """
import torch
from spotguard.runtime.loop.batch_trial import _memory
from spotguard.runtime.process.memory import give_back_what_is_freed

give_back_what_is_freed()
for _ in range(3):
    torch.zeros(30 << 20, dtype=torch.uint8)
before = _memory("VmData")
large, small = [], []
for _ in range(20):
    large.append(torch.zeros(10 << 20, dtype=torch.uint8))
    small.append(torch.zeros(600 << 10, dtype=torch.uint8))
del large
print(_memory("VmData") - before)
"""


@pytest.mark.slow
def test_a_curve_keeps_memory_free_for_the_moments_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are part of what is saved, and are gone once all is put back."""
    monkeypatch.setattr(batch_trial, "_limit_memory", lambda most: most)
    monkeypatch.setattr(batch_trial, "exit_now", lambda code: None)
    path = tmp_path / "curve.json"
    probe = probed(BatchTrial, lambda net: lambda batch: net(batch).sum(), f"1000:1:{path}")
    probe.run(0)
    weights = sum(p.nbytes for p in probe._values[0].parameters())
    kept_free = json.loads(path.read_text())["kept_free_bytes"]
    assert kept_free - batch_probe._OF_THREADS_BYTES >= 4 * weights


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("net", "room_mb", "other_mb"),
    [
        ("wide", 300, 100),
        ("convolutional", 300, 30),
        ("recurrent", 300, 30),
        ("attention", 300, 30),
    ],
)
def test_it_finds_what_memory_holds(jobs: Jobs, net: str, room_mb: int, other_mb: int) -> None:
    """A quarter more does not fit; all steps and evaluations do; ten tries at most.

    Steps are cut into parts of two sizes: each has kernels of its own.
    """
    said, log = trained(jobs, ROOM_MB=room_mb, NET=net)
    assert len(said) == 4
    size, samples, _ = said[0]
    assert 100 < size < samples == 4000
    assert samples % size > 1
    assert log.count("fits") + log.count("does not") <= MOST_TRIES + 1
    assert fits(jobs, size, room_mb + other_mb, NET=net)
    assert not fits(jobs, int(size / 0.8) + 1, room_mb - other_mb, NET=net)


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_resume_keeps_it_and_another_device_has_its_own(jobs: Jobs) -> None:
    """On such a device nothing is tried again; on a smaller one steps are cut finer.

    The global batches, and but for rounding the weights, are those of a run that has one size.
    """
    whole, _ = trained(jobs, SPOTGUARD_RUN_ID="whole", SIZE=1000)
    first, log = trained(jobs, ROOM_MB=300, code=75, AT=0)
    [limit] = [line.split()[1] for line in log.splitlines() if line.startswith("limit ")]
    same, log = trained(jobs, LIMIT=limit, code=75, AT=1, SPOTGUARD_ATTEMPT=2)
    assert "tried" not in log
    assert same[0][0] == first[0][0]
    other, log = trained(jobs, ROOM_MB=220, SPOTGUARD_ATTEMPT=3)
    assert "tried" in log
    assert other[0][0] < first[0][0]
    found = [*first, *same, *other]
    assert [samples for _, samples, _ in found] == [4000] * 4
    assert [length for *_, length in found] == pytest.approx([w[2] for w in whole], rel=1e-6)


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", [{}, {"DDP": "1"}, {"NET": "convolutional"}], ids=str)
def test_all_ranks_have_what_the_smallest_holds(jobs: Jobs, how: dict[str, str]) -> None:
    """Three ranks of which one has little memory train with its size, and to the same weights."""
    ranks = jobs.start_ranks(
        3, script=AUTO, each=lambda rank: {"ROOM_MB": 180 if rank == 1 else 700}, **how
    )
    assert {job.wait() for job in ranks} == {0}, "\n".join(job.said for job in ranks)
    said = [[ln for ln in job.said.splitlines() if ln.startswith("step ")] for job in ranks]
    sizes = {line.split()[2] for lines in said for line in lines}
    assert len(sizes) == 1
    assert 100 < int(sizes.pop()) < 1334
    lengths = [[line.split()[4] for line in lines] for lines in said]
    assert lengths[0] == lengths[1] == lengths[2]


@pytest.mark.e2e
def test_a_smoke_tries_no_sizes(jobs: Jobs) -> None:
    """Its machine's memory says nothing of the nodes', and its time is for the loop."""
    said, log = trained(jobs, ROOM_MB=450, SPOTGUARD_SMOKE=8, SPOTGUARD_MAX_STEPS=2)
    assert "tried" not in log
    assert [samples for _, samples, _ in said] == [8, 8]


MISUSES = {
    "micro_batch_size='auto'": "needs to know what is done with a batch",
    "micro_batch_size='all', probe=probe": "micro_batch_size is 'all'; allowed: a number, 'auto'",
    "micro_batch_size=2, probe=probe": "probe says nothing without micro_batch_size",
    "micro_batch_size='auto', probe=probe, per_rank='one'": "and per rank exclude each other",
    "micro_batch_size='auto', probe=probe, lr_scaling='linear', reference_world_size=1": (
        "and lr scaling exclude each other"
    ),
}
SCRIPT = """
import torch
import spotguard.runtime as spotguard

run = spotguard.init()
probe = lambda batch: batch.mean()
run.loader(list(torch.randn(8, 2)), global_batch_size=4, ARGUMENTS)
"""


@pytest.mark.e2e
@pytest.mark.parametrize("arguments", MISUSES)
def test_what_cannot_be_tried_is_refused(jobs: Jobs, tmp_path: Path, arguments: str) -> None:
    """In one sentence, before anything begins."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT.replace("ARGUMENTS", arguments))
    assert MISUSES[arguments] in jobs.run(script, code=2)
