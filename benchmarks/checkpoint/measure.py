"""Rounds: every method once in each, in random order, so that all see the same noise."""

from __future__ import annotations

import gc
import mmap
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.checkpoint.floors import Floor
from benchmarks.checkpoint.method import (
    FAILURES,
    Contestant,
    Method,
    bring_into_cache,
    drop_from_cache,
)

if TYPE_CHECKING:
    from benchmarks.checkpoint.method import Pending
    from benchmarks.checkpoint.state import TrainingState

Say = Callable[[str], None]


@dataclass
class Samples:
    """What was measured of one method; seconds, one entry a round."""

    stall_s: list[float] = field(default_factory=list)
    """How long the loop stood still when the next step followed at once."""
    long_step_stall_s: list[float] = field(default_factory=list)
    """The same when a step (an accelerator's: the CPU sleeps) lay between save and overwrite."""
    durable_s: list[float] = field(default_factory=list)
    slow_down_s: list[float] = field(default_factory=list)
    """What CPU-bound steps took longer, in all, from the next overwrite to the end of the save."""
    loss_s: list[float] = field(default_factory=list)
    """What a loop of CPU-bound steps lost by a save in all, where the copy overlaps the steps."""
    warm_s: list[float] = field(default_factory=list)
    cold_s: list[float] = field(default_factory=list)
    size_bytes: int = 0
    first_stall_s: float | None = None
    """Of the warm-up round, which the lists leave out."""
    problem: str | None = None
    """Why there are no more samples."""


@dataclass
class Bench:
    """The state, its twin to restore into, and where to write."""

    state: TrainingState
    target: TrainingState
    folder: Path
    seed: int = 0
    _saves: int = 0

    def next_number(self) -> int:
        """Return a checkpoint number higher than all before."""
        self._saves += 1
        return self._saves


def run_rounds(
    bench: Bench,
    methods: Sequence[type[Method]],
    floors: Sequence[type[Floor]],
    *,
    rounds: int,
    say: Say,
) -> dict[str, Samples]:
    """Measure everything `rounds` times after one round of warm-up; return samples by name."""
    kinds: tuple[type[Contestant], ...] = (*floors, *methods)
    results = {kind.name: Samples() for kind in kinds}
    contestants: list[Contestant] = []
    for kind in kinds:
        try:
            contestants.append(kind(_folder(bench.folder), bench.state))
        except (ImportError, OSError) as problem:
            results[kind.name].problem = f"skipped: {problem}"
            say(f"{kind.name}: skipped: {problem}")
    chance = random.Random(bench.seed)
    step = CpuSteps(bench.state.device)
    for number in range(rounds + 1):
        for one in chance.sample(contestants, len(contestants)):
            samples = results[one.name]
            if samples.problem is not None:
                continue
            try:
                _once(bench, one, samples, step, warm_up=number == 0)
            except FAILURES as problem:  # a rival's failure is a result, too
                samples.problem = f"failed: {type(problem).__name__}: {str(problem)[:200]}"
                say(f"{one.name}: {samples.problem}")
        say(f"round {number} of {rounds} done" if number else "warm-up done")
    for one in contestants:
        one.close()
    return results


_SAMPLED = (
    "stall_s",
    "long_step_stall_s",
    "durable_s",
    "slow_down_s",
    "loss_s",
    "warm_s",
    "cold_s",
)


class WrongBytes(AssertionError):
    """A checkpoint did not hold the values that the state had when it was saved."""


class CpuSteps:
    """Steps that keep the cores busy for some milliseconds each (with CUDA: the GPU)."""

    def __init__(self, device: torch.device) -> None:
        self._one, self._other = torch.randn(2, 512, 512, device=device)
        self._product = torch.empty_like(self._one)
        self._cuda = device.type == "cuda"

    def step(self) -> float:
        """Run one step; return its seconds."""
        started = time.perf_counter()
        for _ in range(4):
            torch.mm(self._one, self._other, out=self._product)
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started

    def usual_s(self) -> float:
        """Return how long a step takes while nothing else goes on; the first few may be slower."""
        return statistics.median([self.step() for _ in range(45)][15:])


def _folder(parent: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=parent))


def _once(
    bench: Bench, one: Contestant, samples: Samples, step: CpuSteps, *, warm_up: bool
) -> None:
    _settle(bench)
    if isinstance(one, Floor):
        elapsed_s = one.measure_s()
        if not warm_up:
            getattr(samples, one.bounds).append(elapsed_s)
        return
    if isinstance(one, Method):
        _measure_method(bench, one, samples, step, warm_up=warm_up)


def _measure_method(
    bench: Bench, one: Method, samples: Samples, step: CpuSteps, *, warm_up: bool
) -> None:
    found = Samples()
    _measure_save_and_restore(bench, one, found)
    if one.background:
        _measure_long_step(bench, one, found, step_s=max(2 * found.stall_s[0], 0.05))
        _measure_slow_down(bench, one, found, step)
        _measure_loss(bench, one, found, step)
    samples.size_bytes = found.size_bytes
    if warm_up:
        samples.first_stall_s = found.stall_s[0]
        return
    for name in _SAMPLED:
        getattr(samples, name).extend(getattr(found, name))


def _settle(bench: Bench) -> None:
    """Give each method the same start.

    On a virtual machine that returns free memory to its host, the first touch of a page costs
    many times the usual, and whoever comes first would pay for all.
    """
    gc.collect()
    size = 2 * bench.state.size_bytes
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        torch.frombuffer(pages, dtype=torch.uint8).fill_(1)


def _measure_save_and_restore(bench: Bench, method: Method, found: Samples) -> None:
    """Save with a short step, overwrite the state at once, and restore what it was before."""
    expected = bench.state.fingerprint()
    number = bench.next_number()
    _synchronize(bench)
    started = time.perf_counter()
    pending = method.save(number)
    pending.wait_until_free()
    found.stall_s.append(time.perf_counter() - started)
    bench.state.overwrite()
    found.durable_s.append(pending.durable.result() - started)
    found.size_bytes = sum(path.stat().st_size for path in method.files())
    for path in method.files():
        bring_into_cache(path)
    found.warm_s.append(_measure_restore(bench, method, number, expected))
    for path in method.files():
        drop_from_cache(path)
    found.cold_s.append(_measure_restore(bench, method, number, expected))
    method.clear()


def _measure_restore(bench: Bench, method: Method, number: int, expected: list[int]) -> float:
    bench.target.overwrite()
    _synchronize(bench)
    started = time.perf_counter()
    method.load(number, bench.target)
    _synchronize(bench)
    elapsed_s = time.perf_counter() - started
    if bench.target.fingerprint() != expected:
        raise WrongBytes("the checkpoint does not hold the values that were saved")
    return elapsed_s


def _measure_long_step(bench: Bench, method: Method, found: Samples, *, step_s: float) -> None:
    started = time.perf_counter()
    pending = method.save(bench.next_number())
    stepped = time.perf_counter()
    time.sleep(step_s)
    resumed = time.perf_counter()
    pending.wait_until_free()
    found.long_step_stall_s.append(time.perf_counter() - resumed + stepped - started)
    pending.durable.result()
    method.clear()


def _measure_slow_down(bench: Bench, method: Method, found: Samples, step: CpuSteps) -> None:
    """After the stall and the next overwrite: who copies meanwhile is not charged for it twice."""
    usual_s = step.usual_s()
    pending = method.save(bench.next_number())
    pending.wait_until_free()
    bench.state.overwrite()
    found.slow_down_s.append(_lost_s(pending, step, usual_s))
    method.clear()


def _measure_loss(bench: Bench, method: Method, found: Samples, step: CpuSteps) -> None:
    """Stall and slow-down together, for a loop that goes on as soon as it is let go."""
    usual_s = step.usual_s()
    started = time.perf_counter()
    pending = method.save(bench.next_number())
    stood_s = time.perf_counter() - started
    found.loss_s.append(stood_s + _lost_s(pending, step, usual_s))
    pending.wait_until_free()
    method.clear()


def _lost_s(pending: Pending, step: CpuSteps, usual_s: float) -> float:
    """Step until the save is complete; return what the steps took longer than usual, in all."""
    steps_s: list[float] = []
    while not pending.durable.done():
        steps_s.append(step.step())
    pending.durable.result()  # raises what went wrong in the background
    # The host may have been busy at one of the two; an error in it would count once a step.
    usual_s = min(usual_s, step.usual_s())
    return sum(steps_s) - len(steps_s) * usual_s


def _synchronize(bench: Bench) -> None:
    if bench.state.device.type == "cuda":
        torch.cuda.synchronize()
