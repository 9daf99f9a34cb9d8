"""One process of a smoke: the script on this machine's CPU, in a store and a folder of its own.

It is told to stop as a cloud would tell it, by a notice after its last step, so that what follows
the loop in the script is not run, and the save is the one that counts on spot nodes. Whatever it
does, it and all that it started are gone when `run` returns.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from spotguard.errors import StoreError
from spotguard.events import env, keys
from spotguard.events.event import Event, JobEvent
from spotguard.events.sample_log_reader import read_sample_trace
from spotguard.events.untrusted import Refused, parse_object
from spotguard.launch.local import smoke_driver
from spotguard.launch.local.processes import kill_all
from spotguard.launch.ranks.worker_environment import look_after_workers, of_only_rank
from spotguard.shared.net import free_port
from spotguard.storage import PrefixedStore, open_store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from spotguard.spec.model import JobSpec

RUN_ID: Final = "smoke"
SAMPLES: Final = 2
_DRIVER: Final = (
    "import sys; sys.path.pop(0); from spotguard.launch.local.smoke_driver import main; "
    "sys.path.insert(0, ''); main(sys.argv[1:])"
)
"""Of one step: one micro-batch, and not one sample, for which batch normalisation has no variance.
"""
QUIET_TRACKERS: Final = {
    "WANDB_MODE": "disabled",
    "MLFLOW_TRACKING_URI": "",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
}
"""Nothing of two steps belongs among a user's experiments; an empty text is this folder's own."""
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
_POLL_S = 0.05
_LOOK_S = 0.5
_STACKS_BEFORE_S = 1.0
"""The stacks are written so long before the process is killed."""
_STACKS_PATIENCE_S = 3.0
"""The process is waited for so much longer, if a busy machine has not let it write them."""
_BUSY_SPAN_S = 3.0
_MOST_AWAKE = 0.25
"""Of the looks at a process that rests: threads of its own wake up to see that all is well."""
_LEAST_LOOKS = 6
_OUTPUT_S = 5.0
_TAIL_BYTES = 32_000
_MOST_TOLD_BYTES = 1 << 20
_LEAST_FREE = 0.04
"""Share of memory, and of the disk, that a smoke leaves to the machine."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """By what the script was left, as it saw it itself."""

    kind: str
    message: str
    hint: str
    is_exit: bool
    exit_code: int | None
    frames: tuple[tuple[str, int], ...]
    """File and line, the innermost last."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """All that is known of a process that has ended."""

    exit_code: int | None
    """Negative: a signal; None: it was ended from here."""
    ended_for: str = ""
    """`time`, `memory` or `disk`, if it was ended from here."""
    steps: int = 0
    """Finished, by this process and the one before it."""
    in_loop: bool = False
    """The loop was reached: all that comes before it went well."""
    first_step_s: float | None = None
    """From the start until the first step of this process was done."""
    busy: float | None = None
    """Cores that it kept busy in its last seconds."""
    idle: float | None = None
    """Cores of this machine that nobody used meanwhile: without one, little says nothing."""
    rests: bool | None = None
    """None of its threads had anything to do in its last seconds, however busy others kept the
    cores; None: this system does not tell."""
    seconds: float = 0.0
    told: Told | None = None
    stacks: str = ""
    """Of all threads, shortly before it was ended or as it crashed."""
    printed: str = ""
    """The end of what it printed."""
    losses: tuple[float, ...] = ()
    """Of its steps."""
    modules: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Top modules that were imported, and all of the user's own, with their files."""
    events: tuple[Event, ...] = field(default=(), repr=False)

    def event(self, kind: JobEvent) -> dict[str, Any] | None:
        """Return the data of the newest event of a kind; None if there is none."""
        return next((e.data for e in reversed(self.events) if e.kind == kind.value), None)


@dataclass(frozen=True, kw_only=True)
class Stint:
    """What one process is to do."""

    attempt: int
    stop_after: int
    """Steps, of all processes."""
    whole_batches: bool
    """False: `SAMPLES` a step."""
    limit_s: float
    variables: Mapping[str, str] = field(default_factory=dict)
    """More of its environment; `{room}` in a value stands for its folder."""


def run_stint(spec: JobSpec, folder: Path, stint: Stint) -> Facts:
    """Run the script for some steps and return what it did. Blocks for `stint.limit_s` at most.

    Args:
        spec: the job.
        folder: of the smoke; the store in it is shared by its processes.
        stint: what this process is to do.
    """
    room = folder / f"process-{stint.attempt}{'w' if stint.whole_batches else ''}"
    room.mkdir(mode=0o700)
    process = _Process(spec, folder, room, stint)
    try:
        process.start()
        process.watch()
    finally:
        process.end()
    return process.facts()


class _Process:
    def __init__(self, spec: JobSpec, folder: Path, room: Path, stint: Stint) -> None:
        self._spec = spec
        self._folder = folder
        self._room = room
        self._stint = stint
        self._progress = room / "progress"
        self._notice = room / "notice"
        self._stacks = room / smoke_driver.STACKS_FILE
        self._child: subprocess.Popen[bytes]
        self._lifeline: int | None = None
        """Kept open: the child ends as soon as nobody has it."""
        self._reader: threading.Thread
        self._tail: collections.deque[bytes] = collections.deque()
        self._ended_for = ""
        self._first_step_s: float | None = None
        self._steps = 0
        self._total = 0
        self._began_at = 0.0
        self._seconds = 0.0
        self._cpu: collections.deque[tuple[float, float, float]] = collections.deque(maxlen=16)
        self._awake: collections.deque[bool | None] = collections.deque(maxlen=16)

    def start(self) -> None:
        self._progress.write_bytes(bytes(16))
        self._stacks.touch()
        self._began_at = time.monotonic()
        lifeline, self._lifeline = os.pipe()
        try:
            self._child = subprocess.Popen(
                [
                    sys.executable,
                    *("-c", _DRIVER),  # by `-m` the workdir's modules would come before Python's
                    str(self._room),
                    str(time.time() + self._stint.limit_s - _STACKS_BEFORE_S),
                    str(lifeline),
                    self._spec.script,
                    *self._spec.args,
                ],
                cwd=self._spec.workdir,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(lifeline,),
            )
        finally:
            os.close(lifeline)
        self._reader = threading.Thread(target=self._keep_tail, name="smoke-output", daemon=True)
        self._reader.start()

    def watch(self) -> None:
        """Return when the process has ended, or has to be."""
        look_at = 0.0
        while self._child.poll() is None:
            now = time.monotonic()
            self._read_progress(now)
            if self._steps >= self._stint.stop_after and not self._notice.exists():
                self._notice.touch()
            over_s = now - self._began_at - self._stint.limit_s
            if over_s > _STACKS_PATIENCE_S or (over_s > 0 and self._stacks.stat().st_size):
                self._ended_for = "time"
            elif now > look_at:
                look_at = now + _LOOK_S
                self._ended_for = self._look(now)
            if self._ended_for:
                return
            time.sleep(_POLL_S)

    def end(self) -> None:
        """Kill what is left of it, whatever group or session that is in."""
        self._seconds = time.monotonic() - self._began_at  # the killing is no time of its own
        child = getattr(self, "_child", None)
        if child is not None:
            if child.poll() is None:
                child.kill()
            child.wait()
            kill_all(self._room)
        if self._lifeline is not None:  # not before: the group of a leader that is gone is nobody's
            os.close(self._lifeline)
            self._lifeline = None
        if child is None:
            return
        self._reader.join(_OUTPUT_S)  # all that could print is gone
        self._read_progress(time.monotonic())

    def facts(self) -> Facts:
        code = self._child.returncode
        busy, idle = self._use_of_cores()
        return Facts(
            exit_code=None if self._ended_for else code,
            ended_for=self._ended_for,
            steps=self._steps,
            in_loop=self._total > 0,
            first_step_s=self._first_step_s,
            busy=busy,
            idle=idle,
            rests=self._rests(),
            seconds=self._seconds,
            told=self._read_told(),
            stacks=_text_of(self._stacks),
            printed=b"".join(self._tail).decode(errors="replace")[-_TAIL_BYTES:],
            losses=self._losses(),
            modules=self._modules(),
            events=tuple(self._events()),
        )

    def _environment(self) -> dict[str, str]:
        stint, spec = self._stint, self._spec
        given = {**os.environ, **spec.env}
        told = {
            **{name: value for name, value in given.items() if not name.startswith("SPOTGUARD_")},
            **QUIET_TRACKERS,
            "MLFLOW_TRACKING_URI": (self._room / "mlflow").as_uri(),
            **_NO_GPU,
            **{name: v.replace("{room}", str(self._room)) for name, v in stint.variables.items()},
            "PYTHONUNBUFFERED": "1",
            **of_only_rank(free_port()),
            env.RUN_ID: RUN_ID,
            env.ATTEMPT: str(stint.attempt),
            env.STORE: str(self._store),
            env.NODE: "0",
            env.PROGRESS: str(self._progress),
            env.NOTICE_FILE: str(self._notice),
            env.HOLD: f"{stint.stop_after}:{stint.limit_s}",
            env.TRACE_SAMPLES: str(self._samples),
            env.SMOKE: "0" if stint.whole_batches else str(SAMPLES),
        }
        if spec.seed is not None:
            told[env.SEED] = str(spec.seed)
        look_after_workers(told)
        return told

    @property
    def _store(self) -> Path:
        return self._folder / ("store-whole" if self._stint.whole_batches else "store")

    @property
    def _samples(self) -> Path:
        return self._room / "samples.jsonl"

    def _losses(self) -> tuple[float, ...]:
        try:
            return tuple(step.loss for step in read_sample_trace(self._samples))
        except (OSError, ValueError, KeyError, TypeError):  # it was ended as it wrote
            return ()

    def _modules(self) -> dict[str, str]:
        try:
            body = json.loads(_text_of(self._room / smoke_driver.MODULES_FILE) or "{}")
            return {str(name): str(file) for name, file in body.items()}
        except (ValueError, AttributeError):  # it was ended as it wrote
            return {}

    def _keep_tail(self) -> None:
        assert self._child.stdout is not None
        kept = 0
        with self._child.stdout as output:
            while chunk := os.read(output.fileno(), 1 << 16):
                self._tail.append(chunk)
                kept += len(chunk)
                while kept - len(self._tail[0]) > _TAIL_BYTES:
                    kept -= len(self._tail.popleft())

    def _read_progress(self, now: float) -> None:
        raw = self._progress.read_bytes()
        if len(raw) != 16:
            return
        self._steps, self._total = struct.unpack("<qq", raw)
        begun_with = self._stint.stop_after - 1 if self._stint.attempt > 1 else 0
        if self._steps > begun_with and self._first_step_s is None:
            self._first_step_s = now - self._began_at

    def _look(self, now: float) -> str:
        """Return for what the process has to be ended, if it has; take note of what it does."""
        total = psutil.virtual_memory()
        if total.available < _LEAST_FREE * total.total and self._memory() > total.total / 4:
            return "memory"
        disk = shutil.disk_usage(self._folder)
        if disk.free < _LEAST_FREE * disk.total and _size_of(self._folder) > disk.free:
            return "disk"
        self._cpu.append((now, self._cpu_s(), float(psutil.cpu_times().idle)))
        self._awake.append(_any_awake(each.pid for each in self._tree()))
        return ""

    def _tree(self) -> list[psutil.Process]:
        try:
            main = psutil.Process(self._child.pid)
            return [main, *main.children(recursive=True)]
        except psutil.Error:
            return []

    def _memory(self) -> int:
        return sum(_asked(lambda each=each: each.memory_info().rss) for each in self._tree())

    def _cpu_s(self) -> float:
        def used(process: psutil.Process) -> float:
            times = process.cpu_times()
            return float(times.user + times.system)

        return float(sum(_asked(lambda each=each: used(each)) for each in self._tree()))

    def _use_of_cores(self) -> tuple[float | None, float | None]:
        """Return how many cores it kept busy lately, and how many nobody did."""
        if len(self._cpu) < 2:
            return None, None
        last_at, last_used, last_idle = self._cpu[-1]
        at, used, idle = next(seen for seen in self._cpu if last_at - seen[0] <= _BUSY_SPAN_S)
        if last_at <= at:
            return None, None
        return (last_used - used) / (last_at - at), (last_idle - idle) / (last_at - at)

    def _rests(self) -> bool | None:
        seen = [awake for awake in self._awake if awake is not None]
        return sum(seen) <= _MOST_AWAKE * len(seen) if len(seen) >= _LEAST_LOOKS else None

    def _read_told(self) -> Told | None:
        text = _text_of(self._room / smoke_driver.PROBLEM_FILE)
        try:
            body = parse_object(text, "what left the script") if text else {}
            frames = tuple((str(file), int(line)) for file, line in body.get("frames", ()))
            return Told(
                kind=str(body["kind"]),
                message=str(body["message"]),
                hint=str(body["hint"]),
                is_exit=bool(body["is_exit"]),
                exit_code=body["exit_code"] if isinstance(body["exit_code"], int) else None,
                frames=frames,
            )
        except (Refused, KeyError, TypeError, ValueError):  # it died while it wrote, or at once
            return None

    def _events(self) -> list[Event]:
        try:
            store = PrefixedStore(open_store(str(self._store)), RUN_ID)
            found = [info.key for info in store.list(keys.events(self._stint.attempt))]
            return [Event.from_json(store.get(k, max_bytes=_MOST_TOLD_BYTES)) for k in found]
        except (StoreError, Refused):
            return []


def _any_awake(processes: Iterable[int]) -> bool | None:
    """Return whether any thread of theirs runs, wants to run, or waits for a disk; None: unknown.

    On a crowded machine one that wants to run has little time, too, and does not rest.
    """
    found: set[str] = set()
    for process in processes:
        for stat in Path(f"/proc/{process}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                found.add(stat.read_text().rpartition(")")[2].split()[0])
    return bool(found & {"R", "D"}) if found else None


def _asked(ask: Any) -> Any:
    """Return what a process says of itself; 0 of one that has ended meanwhile."""
    try:
        return ask()
    except psutil.Error:
        return 0


def _size_of(folder: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):  # files come and go meanwhile
        for path in folder.rglob("*"):
            with contextlib.suppress(OSError):
                total += path.lstat().st_size
    return total


def _text_of(path: Path) -> str:
    try:
        with path.open(errors="replace") as file:
            return file.read(_MOST_TOLD_BYTES)
    except OSError:
        return ""


def signal_name(exit_code: int) -> str:
    """Return `SIGSEGV` for -11."""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"
