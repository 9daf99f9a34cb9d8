"""What looking at a very long run costs: 10 000 checkpoints and a million events.

python -m benchmarks.scale --json out.json

The run is made up (`benchmarks.scale.long_run`). Its store is a folder, and then a bucket that is
played in memory: each request takes 30 ms there, and a listing has pages of 1000. Memory is a
process's peak; in the process that plays the bucket, too, by how much it grew.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from benchmarks.scale.long_run import RUN_ID, LongRun, created
from spotguard.checkpoint.lineage import claim_attempt, latest_valid, list_all
from spotguard.checkpoint.retention import Retention, prune
from spotguard.control.checkpoints.commands import list_checkpoints
from spotguard.control.checkpoints.detail import describe
from spotguard.control.checkpoints.find import OpenedRun, find_checkpoint
from spotguard.control.handover.adopt import Rebuild
from spotguard.control.journal.job_events import JobNews
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.ledger import Ledger
from spotguard.control.journal.record import Kind
from spotguard.control.run_folder import RunFolder
from spotguard.control.status.watch import Watch
from spotguard.events import keys
from spotguard.launch.local import LocalLauncher
from spotguard.launch.local.options import LocalOptions
from spotguard.shared.units import SystemClock
from spotguard.spec.model import build_spec
from spotguard.storage import PrefixedStore, open_store
from spotguard.storage.remote.bucket import ALWAYS
from spotguard.storage.remote.store import RemoteStore
from spotguard.testing.bucket import MemoryBucket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from spotguard.spec.model import JobSpec
    from spotguard.storage.base import ObjectStore

    Action = Callable[[ObjectStore], object]

Result = TypeVar("Result")

LIMIT_S = 2.0
LIMIT_MB = 150.0
_PROBE = """
import pathlib, runpy, sys
status = sys.argv.pop(1)
try:
    runpy.run_module("spotguard.cli", run_name="__main__", alter_sys=True)
finally:
    pathlib.Path(status).write_text(pathlib.Path("/proc/self/status").read_text())
"""
"""Runs a command and tells what its process took; the peak that `wait4` tells is its parent's."""
_SHOWN = 100
"""Checkpoints in the list that is measured."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement."""

    what: str
    where: str
    wall_s: float
    requests: int | None
    """None where there is no bucket."""
    peak_mb: float

    @property
    def holds(self) -> bool:
        """True if it is within the limits."""
        return self.wall_s <= LIMIT_S and self.peak_mb <= LIMIT_MB


class SlowBucket(MemoryBucket):
    """A bucket each of whose requests takes a while, once it is filled."""

    request_s = 0.0

    def _call(self, op: str, effect: Callable[[], Result]) -> Result:
        time.sleep(self.request_s)
        return super()._call(op, effect)


# ---------------------------------------------------------------- on the run's store


def actions(run: LongRun, journal_path: Path) -> Iterator[tuple[str, Action]]:
    """Yield (name, what is done with the run's store)."""
    newest = run.attempts

    def restart_controller(store: ObjectStore) -> None:
        with Journal.open(journal_path) as journal:
            news = JobNews(store, Ledger(journal, SystemClock()))
            assert not list(news.events(newest, all_of_them=True)), "the journal has all of them"
            news.beats(newest, range(1))

    def adopt(store: ObjectStore) -> None:
        with tempfile.TemporaryDirectory() as fresh:
            launcher = LocalLauncher(Path(fresh), LocalOptions())
            with Journal.create(Path(fresh, "journal.db")) as journal, journal.all_or_nothing():
                journal.append(Kind.CREATED.value, at=0.0, data=created("memory://"))
                Rebuild(journal, launcher, RUN_ID).attempts(store)

    def resume(store: ObjectStore) -> None:
        manifest, _ = latest_valid(store)
        assert manifest is not None
        claim_attempt(store, newest + 1, manifest.prefix)
        store.delete(keys.claim(newest + 1))

    def show(store: ObjectStore) -> None:
        listing = list_all(store)
        describe(_opened(store), find_checkpoint(store, None, listing), listing)

    keep_all, keep_few = Retention(keep_last=2 * run.checkpoints), Retention(keep_last=3)
    yield "controller restarts", restart_controller
    yield "adopt", adopt
    yield "job resumes: finds the newest, claims", resume
    yield f"checkpoints ls, {_SHOWN} newest", lambda store: list_checkpoints(_opened(store), _SHOWN)
    yield "checkpoints show", show
    yield "prune after a save", lambda store: prune(store, keep_all, attempt=newest)
    yield "prune, of a backlog", lambda store: prune(store, keep_few, attempt=newest)


def _opened(store: ObjectStore) -> OpenedRun:
    return OpenedRun(run_id=RUN_ID, store=store, at_rest=None)


def on_bucket(run: LongRun, spec: JobSpec, journal_path: Path, request_s: float) -> list[Row]:
    """Measure every action on the run in a bucket, in this process."""
    bucket = SlowBucket()

    def put(key: str, raw: bytes) -> None:
        bucket.put(key, [memoryview(raw)], condition=ALWAYS, writer="made up")

    run.fill(put, spec)
    bucket.request_s = request_s
    return [
        _measured(name, partial(act, RemoteStore(bucket)), bucket=bucket)
        for name, act in actions(run, journal_path)
    ]


def on_folder(run: LongRun, root: Path, journal_path: Path) -> list[Row]:
    """Measure every action on the run in a folder, in this process."""
    store = PrefixedStore(open_store(str(root)), RUN_ID)
    return [_measured(name, partial(act, store)) for name, act in actions(run, journal_path)]


def on_journal(home: Path) -> list[Row]:
    """Measure the looks of somebody who follows the run, in this process."""
    looks = Watch(RunFolder(home / "runs" / RUN_ID))
    return [
        _measured("status --watch, first look", looks.look, where="journal"),
        _measured("status --watch, each later look", looks.look, where="journal"),
    ]


def _measured(
    name: str,
    act: Callable[[], object],
    *,
    where: str = "folder",
    bucket: MemoryBucket | None = None,
) -> Row:
    if bucket is not None:
        bucket.calls.clear()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before_mb = _status_mb("VmRSS") if bucket else 0.0
    began = time.monotonic()
    act()
    return Row(
        what=name,
        where="bucket" if bucket else where,
        wall_s=time.monotonic() - began,
        requests=bucket.calls.total() if bucket else None,
        peak_mb=_status_mb("VmHWM") - before_mb,
    )


def _status_mb(name: str, status: Path = Path("/proc/self/status")) -> float:
    lines = status.read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


# ---------------------------------------------------------------- on the command line


def on_command_line(home: Path, store_root: Path) -> Iterator[Row]:
    """Measure commands as a user has them: a process each, with all of its start."""
    yield _command("status", home, "status", RUN_ID)
    yield _command("status --json", home, "status", RUN_ID, "--json")
    yield _command("history", home, "history", RUN_ID)
    yield _command("history --json", home, "history", RUN_ID, "--json")
    elsewhere = home.with_name("elsewhere")
    yield _command("adopt", elsewhere, "adopt", str(store_root / RUN_ID), "--yes")
    yield _command("status, once adopted", elsewhere, "status", RUN_ID)


def _command(name: str, home: Path, *words: str) -> Row:
    with tempfile.NamedTemporaryFile() as status:
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-c", _PROBE, status.name, *words],
            env={**os.environ, "SPOTGUARD_HOME": str(home)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        wall_s = time.monotonic() - began
        peak_mb = _status_mb("VmHWM", Path(status.name))
    return Row(what=name, where="command", wall_s=wall_s, requests=None, peak_mb=peak_mb)


# ---------------------------------------------------------------- all of it


def measure(run: LongRun, folder: Path, request_s: float) -> list[Row]:
    """Make the run below `folder` and measure everything."""
    home, store_root = folder / "home", folder / "store"
    script = folder / "train.py"
    script.write_text("pass\n")
    spec = build_spec(
        {"script": str(script), "workdir": str(folder), "name": "long", "store": str(store_root)}
    )
    run.fill(lambda key, raw: _write(store_root / RUN_ID / key, raw), spec)
    journal_path = home / "runs" / RUN_ID / "journal.db"
    journal_path.parent.mkdir(parents=True)
    run.write_journal(journal_path, str(store_root))
    rows = list(on_command_line(home, store_root))
    for act, given in (
        (on_journal, (home,)),
        (on_folder, (run, store_root, journal_path)),
        (on_bucket, (run, spec, journal_path, request_s)),
    ):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            rows += fresh.submit(act, *given).result()
    return rows


def _write(path: Path, raw: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(raw)


def to_markdown(run: LongRun, rows: Sequence[Row]) -> str:
    """Return the table of all measurements."""
    lines = [
        f"{run.checkpoints} checkpoints, {run.events} events, {run.attempts} attempts; "
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "",
        f"| what | where | s (limit {LIMIT_S:g}) | requests | MB (limit {LIMIT_MB:g}) | |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        requests = "" if row.requests is None else str(row.requests)
        lines.append(
            f"| {row.what} | {row.where} | {row.wall_s:.2f} | {requests} | {row.peak_mb:.0f} "
            f"| {'holds' if row.holds else 'too much'} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, return 1 if a limit does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--checkpoints", type=int, default=LongRun.checkpoints)
    parser.add_argument("--events", type=int, default=LongRun.events)
    parser.add_argument("--attempts", type=int, default=LongRun.attempts)
    parser.add_argument("--request-ms", type=float, default=30.0)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    given = parser.parse_args(arguments)
    run = LongRun(checkpoints=given.checkpoints, events=given.events, attempts=given.attempts)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(run, Path(folder), given.request_ms / 1000)
    print(to_markdown(run, rows))
    if given.json:
        body = {"run": asdict(run), "results": [asdict(row) for row in rows]}
        given.json.write_text(json.dumps(body, indent=1), encoding="utf-8")
    return 0 if all(row.holds for row in rows) else 1
