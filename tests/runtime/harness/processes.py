"""Real jobs for the tests of this folder: started quickly, killed, resumed, compared."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotguard.events.event import Event
from spotguard.shared.net import free_port
from spotguard.storage import PrefixedStore, open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.storage.base import ObjectStore

RUNNING = 1000
TINY = Path(__file__).parents[1] / "jobs" / "tiny.py"
PATIENCE_S = 120.0  # also where five others keep the cores busy
_ANSWER_S = 600.0  # the first one comes when torch is imported


class Zygote:
    """The test's end of `zygote.py`."""

    def __init__(self, *preloaded: str) -> None:
        """Load these modules for all jobs, too."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.harness.zygote", *preloaded],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._owed = 0
        """Answers that have not come yet."""
        self._turn = threading.Lock()

    def ask(self, **request: Any) -> int:
        """Send a request and return the answer."""
        with self._turn:
            return self._ask(request)

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        while self._owed:  # to a test that ran out of time: it would be taken for the next one's
            self._answer()
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        self._owed += 1
        return self._answer()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _ANSWER_S)
        assert ready, "no answer to a request"
        answer = int(self._process.stdout.readline())
        self._owed -= 1
        return answer

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate(timeout=PATIENCE_S)


@dataclass
class Job:
    """A running job."""

    zygote: Zygote
    pid: int
    output: Path
    code: int | None = None

    def wait(self) -> int:
        """Return the exit code, negative for a signal; fail if it takes too long."""
        end = time.monotonic() + PATIENCE_S
        while not self.is_over():
            if time.monotonic() > end:
                self.kill(signal.SIGUSR1)
                time.sleep(0.5)
                raise AssertionError(f"it does not end:\n{self.said}")
            time.sleep(0.005)
        assert self.code is not None
        return self.code

    def is_over(self) -> bool:
        """Return whether it has ended; `code` says how."""
        if self.code is None:
            answer = self.zygote.ask(poll=self.pid)
            self.code = None if answer == RUNNING else answer
        return self.code is not None

    def kill(self, number: signal.Signals) -> None:
        """Send a signal to the job's first process."""
        os.kill(self.pid, number)

    def kill_tree(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group, as torchrun does."""
        os.killpg(self.pid, number)

    @property
    def said(self) -> str:
        """Everything that it printed so far."""
        return self.output.read_text() if self.output.exists() else ""

    def wait_for(self, text: str) -> None:
        """Return once it has printed `text`."""
        wait_until(lambda: text in self.said, lambda: f"{text!r} in:\n{self.said}")


@dataclass
class Jobs:
    """Starts jobs and reads what they left in their store."""

    zygote: Zygote
    folder: Path
    prelude: str | None = None
    """A module whose `begin()` goes before each script; what it returns comes after it."""
    started: list[Job] = field(default_factory=list)

    def start(self, script: Path = TINY, *arguments: str, **env: Any) -> Job:
        """Start a script with more environment."""
        output = self.folder / f"output-{len(self.started)}"
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SPOTGUARD_", "PYTEST", "RANK", "WORLD_SIZE"))
        }
        more = {"SPOTGUARD_RUN_ID": "a-run", **env}
        request = {
            "script": str(script),
            "arguments": arguments,
            "folder": str(self.folder),
            "prelude": self.prelude,
            "output": str(output),
            "env": {**kept, **{name: str(value) for name, value in more.items()}},
        }
        job = Job(self.zygote, self.zygote.ask(run=request), output)
        self.started.append(job)
        return job

    def start_ranks(
        self,
        world: int,
        *,
        script: Path = TINY,
        each: Callable[[int], dict[str, Any]] = lambda _: {},
        **env: Any,
    ) -> list[Job]:
        """Start the ranks of one attempt, as torchrun does; `each(rank)` is more environment."""
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": world}
        return [
            self.start(
                script,
                **{**common, "RANK": rank, "LOCAL_RANK": rank, **env, **each(rank)},
            )
            for rank in range(world)
        ]

    def run(self, script: Path = TINY, *arguments: str, code: int = 0, **env: Any) -> str:
        """Run a script to its end, check its exit code, and return what it printed."""
        job = self.start(script, *arguments, **env)
        assert job.wait() == code, job.said
        return job.said

    def events(self, run_id: str = "a-run") -> list[Event]:
        """Return everything that the jobs wrote into their store, in order."""
        store = open_store(str(self.folder / "spotguard-runs" / run_id))
        found = [store.get(item.key) for item in store.list("attempts/") if "/events/" in item.key]
        return sorted(map(Event.from_json, found), key=lambda event: (event.attempt, event.at))

    def store(self, run_id: str = "a-run") -> ObjectStore:
        """Return a run's own store, which need not be there yet."""
        return PrefixedStore(open_store(str(self.folder / "spotguard-runs")), run_id)

    def claims(self, run_id: str = "a-run") -> set[int]:
        """Return the numbers of the attempts that were begun; a claim is there before a step."""
        attempts = self.folder / "spotguard-runs" / run_id / "attempts"
        return {int(claim.parent.name) for claim in attempts.glob("*/claim.json")}

    def ends(self) -> list[dict[str, Any]]:
        """Return the data of each attempt's `ended` event."""
        return [event.data for event in self.events() if event.kind == "ended"]


def digest(said: str, of: str = "digest") -> str:
    """Return the fingerprint of the whole final state, or of `weights`, from a job's output."""
    [line] = [line for line in said.splitlines() if line.startswith(of)]
    return line


def wait_until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    """Return once `condition` is true; fail with `what` if it takes too long."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"never: {what()}"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Return whether a process is there and no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False
