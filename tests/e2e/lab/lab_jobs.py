"""A user's machine in a folder: runs `spotguard` as a user does and looks at what it left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import psutil
from safetensors.numpy import load_file

from spotguard.control.run_folder import RunFolder
from tests.e2e.lab.warm_commands import only_looks, warm_commands

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

JOBS = Path(__file__).parents[1] / "jobs"
STEADY = JOBS / "steady.py"
STEADY_STEPS = 64
EXAMPLES = Path(__file__).parents[3] / "examples"
SPOTGUARD = (sys.executable, "-m", "spotguard.cli")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
FAST_CLOUD = ("--speed-up", "80")
"""A notice of 1.5 s, the shortest that the local cloud gives."""
NO_SMOKE = {"SPOTGUARD_SMOKE_WHEN": "never"}
"""What is tried here is what nodes do: seconds before each launch would prove nothing of it."""
OFTEN = ("--save-every", "5 steps")
_LOOK_EVERY_S = 1.0
"""Each look is a command, or at all processes: more would take the cores from what is waited for.
"""

Weights = dict[str, tuple[str, tuple[int, ...], bytes]]
Status = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """What a command printed and returned."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one document on stdout."""
        body: dict[str, Any] = json.loads(self.out)
        return body


class Lab:
    """A machine with nothing on it: its own home, its own working folder."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.work = folder / "work"
        self.work.mkdir(parents=True)

    def environ(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return this process's environment without what would change spotguard's mind."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SPOTGUARD_", "PYTEST"))}
        return {**kept, **NO_SMOKE, "SPOTGUARD_HOME": str(self.home), **(more or {})}

    def spotguard(
        self, *arguments: str | Path, env: Mapping[str, str] | None = None, timeout_s: float = 400.0
    ) -> Said:
        """Run one command to its end."""
        words = [str(word) for word in arguments]
        if only_looks(words):
            environ = self.environ(env)
            return Said(
                *warm_commands().run(words, cwd=self.work, env=environ, timeout_s=timeout_s)
            )
        return self.run(*SPOTGUARD, *words, env=env, timeout_s=timeout_s)

    def run(
        self, *command: str | Path, env: Mapping[str, str] | None = None, timeout_s: float = 400.0
    ) -> Said:
        """Run any command to its end, in the working folder and without a terminal."""
        done = subprocess.run(
            [str(word) for word in command],
            cwd=self.work,
            env=self.environ(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Said(done.returncode, done.stdout, done.stderr)

    def up(
        self,
        script: Path,
        *flags: str | Path,
        args: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
        code: int = 0,
        timeout_s: float = 400.0,
    ) -> Status:
        """Launch a job, follow it to its end, check its exit code, and return its status."""
        words = ("up", script, "--yes", "--json", *flags, "--", *args)
        said = self.spotguard(*words, env=env, timeout_s=timeout_s)
        assert said.code == code, f"exit {said.code}, not {code}\n{said.out}\n{said.err}"
        return said.json

    def start(
        self,
        script: Path,
        *flags: str | Path,
        args: tuple[str, ...] = (),
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Launch a job in the background and return its run's id."""
        words = ("up", script, "--yes", "--json", "--detach", *flags, "--", *args)
        said = self.spotguard(*words, env=env)
        assert said.code == 0, said.err
        return str(said.json["run_id"])

    def status(self, run: str | None = None) -> Status:
        """Return what `status --json` says."""
        said = self.spotguard("status", *([run] if run else []), "--json")
        assert said.code == 0, said.err
        return said.json

    def follow(self, run: str) -> Status:
        """Wait until a run settles, as a user does, and return its status."""
        said = self.spotguard("status", run, "--watch")
        assert said.code == 0, said.err
        return self.status(run)

    def history(self, run: str) -> list[dict[str, Any]]:
        """Return what `history --json --all` lists."""
        said = self.spotguard("history", run, "--json", "--all")
        assert said.code == 0, said.err
        lines: list[dict[str, Any]] = said.json["history"]
        return lines

    def wait_for_step(
        self,
        run: str,
        step: int,
        *,
        attempt: int = 1,
        timeout_s: float = 200.0,
        every_s: float = _LOOK_EVERY_S,
    ) -> Status:
        """Return once so many steps are done in `attempt` or a later one; look so often."""
        status: Status = {}

        def reached() -> bool:
            nonlocal status
            status = self.status(run)
            assert status["state"] not in ("failed", "paused"), status
            return len(status["attempts"]) >= attempt and (status["step"] or 0) >= step

        wait_until(reached, f"step {step} in attempt {attempt}", timeout_s, every_s=every_s)
        return status

    def wait_for_history(self, run: str, words: str) -> None:
        """Return as soon as a line of the history says `words`."""

        def told() -> bool:
            return any(words in line["text"] for line in self.history(run))

        wait_until(told, f"the history says {words!r}", every_s=_LOOK_EVERY_S)

    def wait_for_the_end(self, timeout_s: float = 120.0) -> None:
        """Return as soon as nothing runs any more that was started from this machine."""
        wait_until(lambda: not self.processes(), "nothing runs", timeout_s, every_s=_LOOK_EVERY_S)

    def controller_pid(self, run: str) -> int | None:
        """Return the id of the process that controls a run, and maybe others."""
        return RunFolder(self.home / "runs" / run).controller_pid()

    def kill_controller(self, run: str) -> None:
        """Kill it as an out-of-memory killer would."""
        pid = self.controller_pid(run)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self.controller_pid(run) is None, "the controller is dead")

    def processes(self) -> list[psutil.Process]:
        """Return every living process that was started, however indirectly, from this machine."""
        found = []
        for process in psutil.process_iter():
            try:
                known = [*process.environ().values(), *process.cmdline()]
                alive = process.status() != psutil.STATUS_ZOMBIE
            except (psutil.Error, OSError):
                continue
            if alive and any(str(self.home) in word for word in known):
                found.append(process)
        return found

    def on_nodes(self) -> list[psutil.Process]:
        """Return those of them that cost: the controller's process leaves a second after them."""
        return [each for each in self.processes() if not _controls(each)]

    def clean_up(self) -> list[str]:
        """Kill what still runs after a moment of grace, and return what that was."""
        give_up_at = time.monotonic() + 8.0
        while self.processes() and time.monotonic() < give_up_at:
            time.sleep(0.1)
        left = []
        for process in self.processes():
            try:
                left.append(" ".join(process.cmdline()))
                process.kill()
            except psutil.Error:
                continue
        return left


def wait_until(
    condition: Callable[[], object], what: str, timeout_s: float = 120.0, *, every_s: float = 0.1
) -> None:
    """Return as soon as `condition` holds, which is looked at so often; fail if not in time."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"not in {timeout_s} s: {what}"
        time.sleep(every_s)


def store_of(status: Status) -> Path:
    """Return the folder in which a run keeps its state."""
    return Path(unquote(urlsplit(status["store"]).path))


def checkpoints(run_folder: Path) -> list[tuple[int, int]]:
    """Return (step, attempt) of every committed checkpoint, in order of both."""
    manifests = run_folder.glob("checkpoints/*/manifest.json")
    names = (manifest.parent.name.split("-") for manifest in manifests)
    return sorted((int(step), int(attempt)) for step, attempt in names)


def weights_at(run_folder: Path, step: int) -> Weights:
    """Return every tensor of the newest checkpoint of `step`, to the last bit."""
    attempt = max(a for s, a in checkpoints(run_folder) if s == step)
    folder = run_folder / "checkpoints" / f"{step:012d}-{attempt:06d}"
    weights: Weights = {}
    for shard in sorted(folder.glob("*.safetensors")):
        for name, array in load_file(shard).items():
            weights[name] = (str(array.dtype), array.shape, array.tobytes())
    return weights


def final_weights(status: Status) -> Weights:
    """Return every tensor of a finished run's last checkpoint, to the last bit."""
    assert status["state"] == "finished"
    assert status["saved_step"] == status["total_steps"]
    return weights_at(store_of(status), status["total_steps"])


def reasons(status: Status) -> list[str]:
    """Return why each attempt ended."""
    return [attempt["end_reason"] for attempt in status["attempts"]]


def _controls(process: psutil.Process) -> bool:
    try:
        return "spotguard.control" in process.cmdline()
    except psutil.Error:
        return False
