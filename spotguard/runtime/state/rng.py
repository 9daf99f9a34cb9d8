"""Randomness that depends on where the run is, never on how many ranks there are.

Python, NumPy and torch (CPU and CUDA) are seeded from `(seed, step, micro index)` before each
micro-batch is read and again before it is handed out, so dropout masks and augmentations are the
same on 1 node and on 7, before and after a resume. So they are when a script sets itself up: its
initial weights and its split of the data are the same on every rank and in every attempt. Seeding
all three costs about 15 microseconds, most of which are Python's own: its generator takes 10 to
fill its 624 words.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import random
import sys
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MASK = (1 << 64) - 1

BOUNDARY = -1
"""Pseudo micro index: the code between two steps."""

EPOCH_TOP, EPOCH_END = -3, -4
"""Pseudo micro indices, of an epoch instead of a step: its body before its steps, and after them.

A script that draws a permutation there, or a part of the data to evaluate, comes to that line again
in an attempt that resumes within the epoch. It must be the same one, on every rank.
"""

_SETUP = -2  # pseudo step: the script before its loop

_beside: list[int] = []
"""The GPUs that this process's models lie on, which may be others than the current one."""

_OTHER_GPU = "cuda:"
"""How the name of another GPU's state begins."""

_python: Any = random.seed.__self__  # type: ignore[attr-defined]  # of all functions of `random`
_seed_python = super(random.Random, _python).seed  # without a look at what kind of seed it is


def spread_over(modules: Iterable[torch.nn.Module]) -> None:
    """Have the generators of all GPUs seeded and kept that these modules lie on.

    What one process runs on several of them, such as a dropout, draws from each one's own.
    """
    tensors = (chain(module.parameters(), module.buffers()) for module in modules)
    _beside[:] = sorted({t.device.index for t in chain.from_iterable(tensors) if t.is_cuda})


def mix(*parts: int) -> int:
    """Return 64 well-mixed bits of `parts` (SplitMix64; Steele, Lea and Flood, 2014)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def seed_everything(value: int) -> None:
    """Seed Python's, NumPy's and torch's global generators; NumPy only if something uses it.

    As `random.seed`, `numpy.random.seed` and `torch.manual_seed` would, in half of the time.
    """
    _seed_python(value)
    _python.gauss_next = None
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        try:
            numpy.random.mtrand._rand.seed(value & 0xFFFFFFFF)
        except TypeError:  # of another kind than usual, by `numpy.random.set_bit_generator`
            numpy.random.seed(value & 0xFFFFFFFF)
    torch.default_generator.manual_seed(value)
    for gpu in gpus_in_use():
        torch.cuda.default_generators[gpu].manual_seed(value)


def seed_setup(seed: int) -> None:
    """Seed the global generators of Python, NumPy (if it is there) and torch, on all its devices.

    For what a script draws between `init` and its loop. It may import NumPy later than now, and
    begin to use a GPU later: then torch seeds it when it does.
    """
    value = mix(seed, _SETUP)
    if importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy")
    torch.manual_seed(value)
    seed_everything(value)


def capture_random_states() -> dict[str, Any]:
    """Return the global generators' states of this rank as plain values and tensors."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state(legacy=False)
    for number, gpu in enumerate(gpus_in_use()):  # the first is this rank's own, whatever its index
        states[f"{_OTHER_GPU}{gpu}" if number else "cuda"] = torch.cuda.get_rng_state(gpu)
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Put back what `capture_random_states` returned."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
        for name in states:
            gpu = name.removeprefix(_OTHER_GPU)
            if gpu != name and int(gpu) < torch.cuda.device_count():
                torch.cuda.set_rng_state(states[name], int(gpu))


@contextlib.contextmanager
def kept_random_states() -> Iterator[None]:
    """Leave the global generators as they were, whatever is seeded and drawn within."""
    states = capture_random_states()
    try:
        yield
    finally:
        restore_random_states(states)


def gpus_in_use() -> list[int]:
    """Return this rank's GPU and the others that its models lie on; none before it uses one.

    Not all of a node's: to seed eight would cost eight calls a batch.
    """
    if not _cuda_in_use():
        return []
    own = torch.cuda.current_device()
    return [own, *(gpu for gpu in _beside if gpu != own)]


def _cuda_in_use() -> bool:
    """Return True if this process has begun to use a GPU; seeding must not be what begins it."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
