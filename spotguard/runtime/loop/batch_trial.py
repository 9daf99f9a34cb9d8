"""What sizes of micro-batches take, in memory and in time: for `spotguard plan --probe`.

On this machine's CPU, under a limit that stands in for a device's memory, sizes are tried from few
samples upwards, each twice the one before, so that there is a curve also where time is over soon.
Then follows the search of `micro_batch_size="auto"`, for which much is known by now. Each size is
written down as soon as it is tried; then the process ends. Nothing is trained.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from spotguard.runtime.loop.batch_probe import BatchProbe
from spotguard.runtime.process.memory import give_back_what_is_freed
from spotguard.runtime.process.surroundings import exit_now

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from spotguard.runtime.data.loader import ElasticLoader, Loader
    from spotguard.runtime.distributed.collectives import ProcessGroup
    from spotguard.runtime.distributed.gradients import GradientSync

_STATUS: Final = Path("/proc/self/status")
_RESET: Final = Path("/proc/self/clear_refs")
_FIRST = 2
"""Of one sample, batch normalisation has no variance."""
_TIME_S = 75.0
"""No size is tried that is expected to take longer, with all that was tried before it."""


@dataclass
class _Curve:
    """What is written down, as it grows."""

    path: Path
    told: dict[str, Any] = field(default_factory=lambda: {"tried": []})

    def write(self, **more: Any) -> None:
        """Write all of it; a reader never finds half of it."""
        self.told.update(more)
        draft = self.path.with_name(f"{self.path.name}.new")
        draft.write_text(json.dumps(self.told))
        draft.replace(self.path)


class _TimeIsOver(Exception):
    """What is to be tried next would take too long."""


class BatchTrial(BatchProbe):
    """Tries sizes under a limit of this process's memory and ends it; used once."""

    def __init__(
        self,
        how: str,
        loader: ElasticLoader,
        values: Sequence[Any],
        gradients: GradientSync,
        ranks: ProcessGroup,
        device: torch.device,
    ) -> None:
        """`how` is what `SPOTGUARD_TRY_BATCH` says."""
        super().__init__(loader, values, gradients, ranks, device)
        self._memory_bytes, self._on_ranks, path = _read(how)
        self._curve = _Curve(path)
        self._pass_s = math.inf
        """Of the faster forward and backward pass of the size that is tried."""
        self._over_at = time.perf_counter() + _TIME_S
        self._known: dict[int, bool] = {}
        """Whether a size fits, of those that were tried."""
        self._took: dict[int, float] = {}
        """Seconds of each."""

    def run(self, first: int) -> NoReturn:
        """Try sizes on the samples from step `first` on, write what they took, and leave."""
        give_back_what_is_freed()
        memory = _limit_memory(self._memory_bytes)
        if memory is None:
            self._curve.write(problem="the memory of a process can be limited on Linux only")
            exit_now(0)
        most = -(-self._loader.global_batch_size // self._on_ranks)
        self._curve.write(
            global_batch_size=self._loader.global_batch_size, most=most, memory_bytes=memory
        )
        with self._trying():
            with contextlib.suppress(_TimeIsOver):
                size = min(_FIRST, most)
                while self._fits(size, first) and size < most:
                    size = min(2 * size, most)
                self._curve.write(chosen=self._without_single(self._search(most, first).size))
            kept_free = self._kept_free_bytes()  # with the moments, which are put back afterwards
        self._curve.write(is_whole=True, kept_free_bytes=kept_free)
        exit_now(0)

    def _fits(self, size: int, first: int) -> bool:
        """Try a size, unless another one says whether it fits.

        Raises:
            _TimeIsOver: it would take too long.
        """
        if any(fits and size <= known for known, fits in self._known.items()):
            return True
        if any(not fits and size >= known for known, fits in self._known.items()):
            return False
        began, can_tell = time.perf_counter(), _forget_peak()
        if began + self._expected_s(size) > self._over_at:
            raise _TimeIsOver
        self._pass_s = math.inf
        fits = self._known[size] = super()._fits(size, first)
        self._took[size] = time.perf_counter() - began
        self._curve.told["tried"].append(
            {
                "samples": size,
                "fits": fits,
                "peak_bytes": _memory("VmHWM") if fits and can_tell else None,
                "pass_s": self._pass_s if fits else None,
            }
        )
        self._curve.write()
        return fits

    def _expected_s(self, size: int) -> float:
        """Return how long a size will take, by the largest smaller one: about as much a sample."""
        smaller = max((known for known, fits in self._known.items() if fits), default=None)
        return 0.0 if smaller is None else self._took[smaller] * size / smaller

    def _pass(self, batch: Any) -> None:
        """Time it: of the two of a size the faster one counts, which others disturbed less."""
        began = time.perf_counter()
        super()._pass(batch)
        self._pass_s = min(self._pass_s, time.perf_counter() - began)


def end_without_curve(how: str, loader: Loader) -> NoReturn:
    """Write down that the script gives its micro-batches a size itself, and leave."""
    _, _, path = _read(how)
    size = loader.micro_batch_size
    _Curve(path).write(problem=f"its loader has micro-batches of {size} samples, and not 'auto'")
    exit_now(0)


def _read(how: str) -> tuple[int, int, Path]:
    memory, ranks, path = how.split(":", 2)
    return int(memory), int(ranks), Path(path)


def _limit_memory(most_bytes: int) -> int | None:
    """Have the process hold so much at most; return that, or less if it was limited before.

    What it holds already counts. None: this system cannot.
    """
    holds, data = _memory("VmRSS"), _memory("VmData")
    if holds is None or data is None:
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # The kernel counts what is reserved: by so much more than is held now.
    limits = [data + most_bytes - holds]
    limits += [each for each in (soft, hard) if each != resource.RLIM_INFINITY]
    limit = max(1, min(limits))
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return max(0, limit - data + holds)


def _memory(name: str) -> int | None:
    """Return the bytes of a line of `/proc/self/status`."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(f"{name}:")), None)
    return None if found is None else int(found.split()[1]) * 1024


def _forget_peak() -> bool:
    """Have the kernel count the most memory anew; return whether it does."""
    try:
        _RESET.write_text("5")
    except OSError:
        return False
    return True
