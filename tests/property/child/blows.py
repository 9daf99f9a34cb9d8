"""What strikes a rank, at the moment that was drawn."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from spotguard.events import keys
from spotguard.storage import open_store

if TYPE_CHECKING:
    from pathlib import Path

FAULTS = ("503", "slow", "torn", "away")
ALL = ("term-all", "term-repeated", "term-then-kill", "int-all", "kill-all")
POLLED = ("notice", "stop")
"""Words that a job looks for a few times a second, in which one of a few steps would be done."""
_LISTENS_S = 0.3


class Struck(RuntimeError):
    """The script's own mistake, as far as anybody can tell."""


class Blows:
    """Counts the moments of this rank, and strikes at the one that was drawn."""

    def __init__(self, asked: dict[str, Any], folder: Path, attempt: int, rank: int) -> None:
        self.counts: Counter[str] = Counter()
        self.step = 0
        """The step under way, counted from 0."""
        self.fault: dict[str, Any] = {}
        """What the store does wrong from now on."""
        self._blow = asked.get("blow")
        self._mine = self._blow is not None and self._blow["victim"] == rank
        self._fault = asked.get("fault")
        self._folder, self._attempt, self._rank = folder, attempt, rank
        self._run_id = asked["run_id"]
        self._struck = threading.Event()
        self._main = threading.main_thread()
        self._patience_s = 0.0

    def at(self, moment: str) -> None:
        """Take note of a moment, and strike if it is the one."""
        self.counts[moment] += 1
        if moment == "step" and self._patience_s > 0 and self._struck.is_set():
            self._patience_s -= _LISTENS_S
            time.sleep(_LISTENS_S)
        fault, blow = self._fault, self._blow
        if fault is not None and (moment, self.counts[moment]) == (fault["at"], fault["nth"]):
            self._begin_fault(fault["kind"])
        if not self._mine or blow is None or self._struck.is_set():
            return
        if moment == blow["at"] and self.counts[moment] >= blow["nth"]:
            if blow["kind"] == "raise" and threading.current_thread() is not self._main:
                return
            self._struck.set()
            self._strike(blow["kind"])

    def _begin_fault(self, kind: str) -> None:
        self._tell("fault")
        kinds: dict[str, dict[str, Any]] = {
            "503": {"fails": 4},
            "slow": {"slows": 12, "seconds": 0.15},
            "torn": {"tears": 4},
            "away": {"until": time.monotonic() + 1.2},
        }
        self.fault = kinds[kind]

    def _tell(self, what: str) -> None:
        told = {"step": self.step, "rank": self._rank, "counts": self.counts}
        path = self._folder / f"{what}-{self._attempt}"
        part = path.with_suffix(f".{self._rank}.part")  # nobody reads half of it
        part.write_text(json.dumps(told))
        part.rename(path)

    def _strike(self, kind: str) -> None:
        self._tell("struck")
        if kind == "raise":
            raise Struck("the learning rate is on fire")
        if kind in POLLED:
            self._patience_s = 3.0
        if kind == "notice":
            (self._folder / f"notice-{self._attempt}-{self._rank}").touch()
        elif kind == "stop":
            word = json.dumps({"reason": "stopped", "message": "by the property test"}).encode()
            store = open_store(self._folder / "spotguard-runs" / self._run_id)
            store.put(keys.stop(self._attempt), word)
        elif kind in ("freeze", "wake"):
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            self._signal(kind)

    def _signal(self, kind: str) -> None:
        number = {
            "kill-one": signal.SIGKILL,
            "kill-all": signal.SIGKILL,
            "int-all": signal.SIGINT,
        }.get(kind, signal.SIGTERM)
        if kind not in ALL:
            return os.kill(os.getpid(), number)
        self._to_all(number)
        if kind == "term-repeated":
            threading.Timer(0.02, self._to_all, (number,)).start()
            threading.Timer(0.05, self._to_all, (number,)).start()
        elif kind == "term-then-kill":
            threading.Timer(0.05, self._to_all, (signal.SIGKILL,)).start()
        return None

    def _to_all(self, number: signal.Signals) -> None:
        """Send it to all ranks, to this one last."""
        for path in sorted(self._folder.glob(f"pid-{self._attempt}-*")):
            pid = int(path.read_text() or 0)
            if pid and pid != os.getpid():
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
        os.kill(os.getpid(), number)
