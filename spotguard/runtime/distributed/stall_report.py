"""Says what each rank is doing when a step stands still while one of them waits for others.

A collective that not all ranks take part in fails after half an hour. Nobody has died by then, so
the ring has nothing to tell: one rank may evaluate alone, or run another number of passes.
"""

from __future__ import annotations

import logging
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from spotguard.runtime.distributed.rendezvous import Coordinator

log = logging.getLogger("spotguard")

_PATIENCE = 6.0
"""After how many `peer_timeout` a step that stands still is looked into."""
_STEPS = 5.0
"""And how many times the usual step it must have taken; scripts evaluate within a step, too."""
_LOOKS = 10
_SLICE_S = 0.05
_OURS = str(Path(__file__).parents[2])
_NOT_THE_SCRIPTS = (_OURS, "/torch/", sysconfig.get_path("stdlib"), "<frozen", "<string>")
_WAITS = (
    "/torch/distributed/",
    "/torch/nn/parallel/distributed.py",
    f"{_OURS}/runtime/distributed/gradients.py",
    f"{_OURS}/runtime/distributed/bitwise_reduce.py",
    f"{_OURS}/runtime/distributed/collectives.py",
)
"""Who is within one of these may wait for other ranks."""


class StillWatch:
    """Looks at this rank's progress from a thread; costs the loop nothing.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        peer_timeout_s: Of the settings.
        connect: Returns a connection to the rendezvous for the thread.
        progress: Returns the steps finished, and the micro-batches done of the one under way.
        step_s: Returns how long a step usually takes.
        tell: Called on one rank that waits, once for a step, with what all are doing.
        place: Returns whether this rank may wait for others, and where in the script it is.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        peer_timeout_s: float,
        connect: Callable[[], Coordinator],
        progress: Callable[[], tuple[int, int]],
        step_s: Callable[[], float],
        tell: Callable[[str], None],
        place: Callable[[], tuple[bool, str]] | None = None,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._limit_s = _PATIENCE * peer_timeout_s
        self._connect = connect
        self._progress = progress
        self._step_s = step_s
        self._tell = tell
        self._place = place or place_of_main_thread
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spotguard-still", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Stop looking; blocks `timeout_s` at most."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        seen, since, told = self._progress(), time.monotonic(), -1
        while not self._closed.wait(self._limit_s / _LOOKS):
            now, at = self._progress(), time.monotonic()
            if now != seen:
                seen, since = now, at
            still_s = at - since
            if still_s < max(self._limit_s, _STEPS * self._step_s()) or told == now[0]:
                continue
            told = now[0]
            try:
                self._ask_all(*now, still_s)
            except ConnectionError:
                log.debug("the rendezvous is gone: nobody to ask")

    def _ask_all(self, finished: int, done: int, still_s: float) -> None:
        words = self._connect()
        waits, place = self._place()
        words.set(
            f"still/{self._rank}/{finished}",
            f"rank {self._rank} in step {finished + 1} at {place}, {done} micro-batches done",
        )
        if not waits:
            return
        until = time.monotonic() + self._limit_s  # others may have gone still a little later
        said = [self._heard(words, peer, finished, until) for peer in range(self._world_size)]
        if self._closed.is_set() or self._progress() != (finished, done):
            return
        if words.first(f"still/told/{finished}", str(self._rank)) == str(self._rank):
            self._tell(
                f"step {finished + 1} has stood still for {still_s:.0f} s and more: "
                + "; ".join(said)
            )

    def _heard(self, words: Coordinator, peer: int, finished: int, until: float) -> str:
        """Return what a peer says of itself. It may have begun the next step, or not this one."""
        while not self._closed.is_set() and time.monotonic() < until:
            for step in (finished, finished - 1, finished + 1):
                word = words.peek(f"still/{peer}/{step}")
                if word is not None:
                    return word
            self._closed.wait(_SLICE_S)
        return f"rank {peer} says nothing"


def place_of_main_thread() -> tuple[bool, str]:
    """Return whether the script may wait for other ranks, and where it is."""
    stack = list(_outwards(sys._current_frames().get(threading.main_thread().ident or 0)))
    waits = any(_is_of(frame, _WAITS) for frame in stack)
    for called, frame in zip([None, *stack], stack, strict=False):
        if not _is_of(frame, _NOT_THE_SCRIPTS):
            file, within = Path(frame.f_code.co_filename).name, (called or frame).f_code.co_name
            return waits, f"{file}:{frame.f_lineno}, in {within}()"
    return waits, "no line of the script"


def _is_of(frame: FrameType, parts: tuple[str, ...]) -> bool:
    return any(part in frame.f_code.co_filename for part in parts)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
