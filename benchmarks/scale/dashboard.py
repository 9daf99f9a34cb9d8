"""What the dashboard costs: 200 runs with a million events, and 50 visitors at once for a minute.

python -m benchmarks.scale.dashboard --json out.json

The server is a process of its own, on loopback, and started twice: the first start reads all the
journals, the second finds what the first has kept. Meanwhile a run goes on under a real controller,
in a third process: how long it is between two of its looks is measured with and without visitors. A
visitor keeps a page open (server-sent events) or loads a page every second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from benchmarks.machine import describe_machine
from benchmarks.scale import lone_controller
from benchmarks.scale.long_run import LongRun
from spotguard.control.supervisor.supervisor import TICK_S

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST_PAGE_LIMIT_S = 0.3
MEMORY_LIMIT_MB = 200.0
START_LIMIT_S = 5.0
"""Of every start but the very first: mostly Python's and the libraries' own."""
LOOK_LIMIT = 1.5
"""So much longer than without visitors may be the median time between two looks."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured."""

    runs: int
    events: int
    first_start_s: float
    """Until it listens: by then all runs are read."""
    start_s: float
    """The same once more: runs at rest are not read again."""
    first_page_s: float
    later_pages_s: tuple[float, ...]
    """Median, and the slowest of a hundred, one after the other."""
    peak_mb: float
    visitors: int
    minute_s: float
    errors: int
    pages: int
    pushes: int
    look_s: float
    """What the controller waits between two looks."""
    looks_alone_s: tuple[float, ...]
    """Median, 99th percentile and longest time from look to look, without visitors."""
    looks_visited_s: tuple[float, ...]

    @property
    def holds(self) -> bool:
        """Whether all limits hold."""
        return (
            self.first_page_s <= FIRST_PAGE_LIMIT_S
            and self.peak_mb <= MEMORY_LIMIT_MB
            and self.start_s <= START_LIMIT_S
            and self.errors == 0
            and self.looks_visited_s[0] <= LOOK_LIMIT * self.looks_alone_s[0]
        )


def make_runs(home: Path, *, runs: int, events: int) -> list[str]:
    """Make up so many runs, with so many events in all; return their folders' names.

    They are copies of one: each is read like any other, only the name inside is the same.
    """
    first, names = home / "first.db", list[str]()
    home.mkdir()
    made = LongRun(checkpoints=1, events=events // runs, attempts=5)
    made.write_journal(first, (home / "store").as_uri())
    for number in range(runs):
        names.append(f"long-run-2601{number // 100 + 1:02d}-{number % 100:06d}-abcd")
        folder = home / "runs" / names[-1]
        folder.mkdir(parents=True)
        shutil.copy(first, folder / "journal.db")
    return names


async def visit(
    base: str, headers: dict[str, str], runs: list[str], *, visitors: int, seconds: float
) -> tuple[int, int, int]:
    """Return (errors, pages, pushes) of so many visitors at once."""
    errors = pages = pushes = 0
    until = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=2 * visitors)

    async def listen(client: httpx.AsyncClient, path: str) -> None:
        nonlocal pushes
        async with client.stream("GET", path) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                pushes += line.startswith("data:")

    async def keep_open(client: httpx.AsyncClient, path: str) -> None:
        nonlocal errors
        try:
            await asyncio.wait_for(listen(client, path), until - time.monotonic())
            errors += 1  # it must not end by itself
        except asyncio.TimeoutError:
            pass
        except httpx.HTTPError:
            errors += 1

    async def load(client: httpx.AsyncClient, path: str) -> None:
        nonlocal errors, pages
        while time.monotonic() < until:
            try:
                (await client.get(path)).raise_for_status()
                pages += 1
            except httpx.HTTPError:
                errors += 1
            await asyncio.sleep(1.0)

    async with httpx.AsyncClient(
        base_url=base, headers=headers, timeout=30.0, limits=limits
    ) as client:
        tasks = []
        for number in range(visitors):
            run = runs[number % 5]
            path = "" if number % 2 else f"/{run}"
            tasks.append(
                load(client, f"/runs{path}" if path else "/")
                if number % 5 == 0
                else keep_open(client, f"/events{path}")
            )
        await asyncio.gather(*tasks)
    return errors, pages, pushes


@contextlib.contextmanager
def dashboard(home: Path) -> Iterator[tuple[str, dict[str, str], int]]:
    """Serve the runs of a home in a process; yields its address, what it must be sent, its pid."""
    process = subprocess.Popen(
        [sys.executable, "-m", "spotguard.cli", "dashboard", "--port", "0"],
        env={**os.environ, "SPOTGUARD_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        told = re.search(r"(http://[^/]+)/\?token=(\S+)", process.stdout.readline())
        assert told is not None
        yield told[1], {"authorization": f"Bearer {told[2]}"}, process.pid
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def controller(home: Path, looks: Path) -> Iterator[None]:
    """Have a run go on in a process, whose looks are written down."""
    command = [sys.executable, "-m", "benchmarks.scale.lone_controller", str(home), str(looks)]
    process = subprocess.Popen(command)
    try:
        until = time.monotonic() + 60
        while not looks.exists() or not looks.read_text():
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(30)


def measure(*, runs: int, events: int, visitors: int, seconds: float) -> Result:
    """Make the runs, serve them, visit them."""
    with tempfile.TemporaryDirectory(prefix="spotguard-dashboard-") as folder:
        home, looks = Path(folder, "home"), Path(folder, "looks")
        names = make_runs(home, runs=runs, events=events)
        starts, loads, peaks = list[float](), list[float](), list[float]()
        began = time.perf_counter()
        with dashboard(home) as (_, _, pid):
            starts.append(time.perf_counter() - began)
            peaks.append(_peak_mb(pid))
        began = time.perf_counter()
        with dashboard(home) as (base, headers, pid), controller(home, looks):
            starts.append(time.perf_counter() - began)
            with httpx.Client(base_url=base, headers=headers, timeout=60.0) as client:
                for _ in range(101):
                    began = time.perf_counter()
                    client.get("/").raise_for_status()
                    loads.append(time.perf_counter() - began)
            alone_at = time.monotonic()
            time.sleep(seconds / 3)
            visited_at = time.monotonic()
            shown = [lone_controller.RUN_ID, *names]
            counted = asyncio.run(visit(base, headers, shown, visitors=visitors, seconds=seconds))
            ended_at = time.monotonic()
            peaks.append(_peak_mb(pid))
        looked_at = [float(line) for line in looks.read_text().split()]
        return Result(
            runs=runs,
            events=events,
            first_start_s=starts[0],
            start_s=starts[1],
            first_page_s=loads[0],
            later_pages_s=(statistics.median(loads[1:]), max(loads[1:])),
            peak_mb=max(peaks),
            visitors=visitors,
            minute_s=seconds,
            errors=counted[0],
            pages=counted[1],
            pushes=counted[2],
            look_s=TICK_S,
            looks_alone_s=_gaps(looked_at, alone_at, visited_at),
            looks_visited_s=_gaps(looked_at, visited_at, ended_at),
        )


def _peak_mb(pid: int) -> float:
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert peak is not None
    return int(peak[1]) / 1024


def _gaps(looked_at: list[float], since: float, until: float) -> tuple[float, float, float]:
    """Return the median, the 99th percentile and the longest time between two looks."""
    within = [at for at in looked_at if since <= at <= until]
    gaps = sorted(after - before for before, after in pairwise(within))
    return statistics.median(gaps), gaps[int(0.99 * (len(gaps) - 1))], gaps[-1]


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--visitors", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    result = measure(
        runs=chosen.runs,
        events=chosen.events,
        visitors=chosen.visitors,
        seconds=chosen.seconds,
    )
    body = {"machine": describe_machine("cpu"), "load": os.getloadavg(), **asdict(result)}
    print(json.dumps(body, indent=2, default=str))
    if chosen.json:
        chosen.json.write_text(json.dumps(body, indent=2, default=str))
    return 0 if result.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
