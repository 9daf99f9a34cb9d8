"""Ships what an attempt's ranks print on this node, and shows it where it always was shown.

Three threads, so that nothing waits for anything: one reads what was printed, with its time; one
stores it; one shows it on this process's own output, whose reader may hang or be gone. The ranks
print into files and notice none of it. What is not stored yet waits in these files.

What is printed is stored within five seconds, if the store answers: whenever this node dies, no
more is lost.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, BinaryIO

from spotguard.errors import SpotguardError
from spotguard.events import keys
from spotguard.events.log_line import LAUNCHER, STDOUT, StoredLine
from spotguard.events.masking import Masker
from spotguard.launch.logs.printed_files import PrintedFiles, PrintedLine
from spotguard.shared.calm_threads import be_calm
from spotguard.shared.paths import scratch_folder
from spotguard.storage.deadline import give_up_after
from spotguard.storage.patterns.growing_lines import GrowingObjects
from spotguard.storage.urls import is_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from spotguard.shared.units import Clock
    from spotguard.storage.base import ObjectStore

KEPT_BYTES = 64 << 20
"""Of one node's output in one attempt, compressed: a quarter of it the beginning."""
_LOOK_S = 0.5
_SHOW_S = 0.2
_SHIP_EVERY_S = 3.0
"""With a look and an upload, within five seconds."""
_SHIP_EVERY_S_TO_A_FOLDER = 2.0
"""Where nothing is paid for a write."""
_SHIP_BYTES = 256 << 10
_WAITING_BYTES = 4 << 20
"""What is read ahead of a slow store."""
_REQUEST_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 3.0


class Shipping:
    """What one attempt prints on one node. `start` begins, `finish` and `join` end it."""

    def __init__(
        self,
        open_store: Callable[[], ObjectStore],
        *,
        url: str,
        attempt: int,
        node: int,
        first_rank: int,
        nproc: int,
        secrets: Iterable[str],
        clock: Clock,
    ) -> None:
        """`open_store` returns the run's own store; it is called by a thread, until it can."""
        self._open_store = open_store
        self._every_s = _SHIP_EVERY_S_TO_A_FOLDER if is_folder(url) else _SHIP_EVERY_S
        self._attempt = attempt
        self._node = node
        self._clock = clock
        self.folder = scratch_folder("spotguard-logs-")
        """Where ranks print: `--log-dir` of `launch.ranks`."""
        masker = Masker(secrets)
        self._read, self._shown = (
            PrintedFiles(
                self.folder, first_rank=first_rank, nproc=nproc, masker=masker, patience_s=1.0
            )
            for _ in range(2)
        )
        self._over = threading.Event()
        self._give_up_at: float | None = None
        self._changed = threading.Condition()
        self._waiting: deque[tuple[float, PrintedLine]] = deque()
        self._waiting_bytes = 0
        self._all_read = False
        self._threads = [
            threading.Thread(target=part, name=f"spotguard-logs-{name}", daemon=True)
            for name, part in (
                ("read", self._keep_reading),
                ("store", self._keep_storing),
                ("show", self._keep_showing),
            )
        ]

    def start(self) -> None:
        """Begin to read; the files need not be there."""
        for thread in self._threads:
            thread.start()

    def note(self, words: str) -> None:
        """Take a line of the agent's own, which it has shown already."""
        self._take([PrintedLine(None, LAUNCHER, words.encode(), False)])

    def finish(self, give_up_after_s: float) -> None:
        """Nothing is printed any more: read and store the rest, for so long at most. Returns."""
        self._give_up_at = self._clock.monotonic() + give_up_after_s
        self._over.set()
        with self._changed:
            self._changed.notify_all()

    def join(self) -> bool:
        """Block until all is shown and stored, or given up; return whether it is stored."""
        for thread in self._threads:
            left_s = max(0.0, (self._give_up_at or 0.0) - self._clock.monotonic())
            thread.join(left_s)
        done = not any(thread.is_alive() for thread in self._threads)
        if done:
            self._read.close()
            self._shown.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        return done and not self._waiting

    # ------------------------------------------------------------------ reading

    def _keep_reading(self) -> None:
        be_calm()
        while True:
            over = self._over.wait(_LOOK_S)
            if self._waiting_bytes >= _WAITING_BYTES and not self._is_given_up:
                self._read.give_back(self._shown)
                if over:
                    self._clock.sleep(_LOOK_S)
                continue
            now = self._clock.monotonic()
            self._take(self._read.read(now, most_bytes=_WAITING_BYTES, final=over))
            self._read.give_back(self._shown)
            if over and (self._read.read_all or self._is_given_up):
                break
        with self._changed:
            self._all_read = True
            self._changed.notify_all()

    def _take(self, lines: Iterable[PrintedLine]) -> None:
        now = self._clock.monotonic()
        for line in lines:
            with self._changed:
                self._waiting.append((now, line))
                self._waiting_bytes += len(line.raw) + 1
                if len(self._waiting) == 1 or self._waiting_bytes >= _SHIP_BYTES:
                    self._changed.notify_all()

    @property
    def _is_given_up(self) -> bool:
        return self._give_up_at is not None and self._clock.monotonic() >= self._give_up_at

    # ------------------------------------------------------------------ storing

    def _keep_storing(self) -> None:
        be_calm()
        pause_s = _FIRST_PAUSE_S
        objects: GrowingObjects | None = None
        while (objects is not None and not objects.is_stored) or self._wait_for_lines():
            if self._is_given_up:
                return
            try:
                with give_up_after(self._request_s()):
                    if objects is None:
                        objects = self._objects(self._open_store())
                    if not objects.is_full:
                        objects.add(self._packed(self._batch()))
                    objects.store()
                pause_s = _FIRST_PAUSE_S
            except SpotguardError:  # said by whoever reads and finds nothing; a log cannot log that
                self._clock.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _objects(self, store: ObjectStore) -> GrowingObjects:
        return GrowingObjects(
            store,
            keys.logs(self._attempt),
            owner=self._node,
            at=self._clock.now(),
            most_bytes=KEPT_BYTES,
        )

    def _request_s(self) -> float:
        if self._give_up_at is None:
            return _REQUEST_S
        return max(0.1, min(_REQUEST_S, self._give_up_at - self._clock.monotonic()))

    def _wait_for_lines(self) -> bool:
        """Block until there is enough to store; False once there is nothing more to come."""
        with self._changed:
            while not self._waiting and not self._all_read:
                self._changed.wait()
            while self._waiting and not self._all_read and self._waiting_bytes < _SHIP_BYTES:
                left_s = self._waiting[0][0] + self._every_s - self._clock.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            return bool(self._waiting)

    def _batch(self) -> list[tuple[float, PrintedLine]]:
        batch: list[tuple[float, PrintedLine]] = []
        with self._changed:
            size = 0
            while self._waiting and size < _SHIP_BYTES:
                taken = self._waiting.popleft()
                size += len(taken[1].raw) + 1
                batch.append(taken)
            self._waiting_bytes -= size
        return batch

    def _packed(self, batch: list[tuple[float, PrintedLine]]) -> list[bytes]:
        began = self._clock.now() - self._clock.monotonic()
        return [_stored(line, began + at).to_json() for at, line in batch]

    # ------------------------------------------------------------------ showing

    def _keep_showing(self) -> None:
        outputs = {STDOUT: sys.stdout.buffer}
        while True:
            over = self._over.wait(_SHOW_S)
            now = self._clock.monotonic()
            for line in self._shown.read(now, most_bytes=_WAITING_BYTES, final=over):
                _show(outputs.get(line.shown_on, sys.stderr.buffer), line)
            for output in (sys.stdout.buffer, sys.stderr.buffer):
                with contextlib.suppress(OSError, ValueError):
                    output.flush()
            if over and (self._shown.read_all or self._is_given_up):
                return


def _show(output: BinaryIO, line: PrintedLine) -> None:
    with contextlib.suppress(OSError, ValueError):  # whoever read it is gone; the store has it
        output.write(line.raw if line.more else line.raw + b"\n")


def _stored(line: PrintedLine, at: float) -> StoredLine:
    """Return the line as it is stored: of a progress bar only what it showed last."""
    text = line.raw.decode(errors="replace").rstrip("\r")
    more = line.more
    if "\r" in text:
        text, more = text.rpartition("\r")[2], False
    elif more and line.raw.endswith(b"\r"):
        more = False
    return StoredLine(at, line.rank, line.stream, text, more)
