"""What the dashboard costs: 200 runs with a million events, and 50 visitors at once for a minute.

python -m benchmarks.scale.dashboard --json out.json

The server is a process of its own, on loopback. While visitors look, one run goes on: its journal
gets ten events a second, as from a controller, and how long each takes is measured with and without
visitors. A visitor keeps a page open (server-sent events) or loads a page every second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from benchmarks.machine import describe_machine
from benchmarks.scale.long_run import LongRun
from spotguard.control.journal.journal import Journal
from spotguard.control.journal.record import Kind

FIRST_PAGE_LIMIT_S = 0.3
MEMORY_LIMIT_MB = 200.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured."""

    runs: int
    events: int
    start_s: float
    """Until it listens: by then all runs are read."""
    first_page_s: float
    later_pages_s: tuple[float, ...]
    """Median, and the slowest of a hundred, one after the other."""
    peak_mb: float
    visitors: int
    minute_s: float
    errors: int
    pages: int
    pushes: int
    append_alone_ms: tuple[float, ...]
    """Median and 99th percentile of writing one event to a journal, without visitors."""
    append_visited_ms: tuple[float, ...]


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


def appending(journal: Path, stop: threading.Event, took_s: list[float]) -> None:
    """Write ten events a second into a journal until told to stop."""
    step = 0
    with Journal.open(journal) as opened:
        while not stop.wait(0.1):
            step += 1
            began = time.perf_counter()
            opened.append(Kind.PROGRESS.value, at=time.time(), attempt=5, data={"step": step})
            took_s.append(time.perf_counter() - began)


def _appended_for(journal: Path, seconds: float) -> list[float]:
    stop, took_s = threading.Event(), list[float]()
    writer = threading.Thread(target=appending, args=(journal, stop, took_s))
    writer.start()
    time.sleep(seconds)
    stop.set()
    writer.join()
    return took_s


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


def measure(*, runs: int, events: int, visitors: int, seconds: float) -> Result:
    """Make the runs, serve them, visit them."""
    with tempfile.TemporaryDirectory(prefix="spotguard-dashboard-") as folder:
        home = Path(folder, "home")
        names = make_runs(home, runs=runs, events=events)
        journal = home / "runs" / names[0] / "journal.db"
        began = time.perf_counter()
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
            start_s = time.perf_counter() - began
            base, headers = told[1], {"authorization": f"Bearer {told[2]}"}
            loads = []
            with httpx.Client(base_url=base, headers=headers, timeout=60.0) as client:
                for _ in range(101):
                    began = time.perf_counter()
                    client.get("/").raise_for_status()
                    loads.append(time.perf_counter() - began)
            alone_s = _appended_for(journal, seconds / 3)
            stop, visited_s = threading.Event(), list[float]()
            writer = threading.Thread(target=appending, args=(journal, stop, visited_s))
            writer.start()
            counted = asyncio.run(visit(base, headers, names, visitors=visitors, seconds=seconds))
            stop.set()
            writer.join()
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = re.search(r"VmHWM:\s+(\d+) kB", status)
            assert peak is not None
        finally:
            process.terminate()
            process.wait(30)
        return Result(
            runs=runs,
            events=events,
            start_s=start_s,
            first_page_s=loads[0],
            later_pages_s=(statistics.median(loads[1:]), max(loads[1:])),
            peak_mb=int(peak[1]) / 1024,
            visitors=visitors,
            minute_s=seconds,
            errors=counted[0],
            pages=counted[1],
            pushes=counted[2],
            append_alone_ms=_spread_ms(alone_s),
            append_visited_ms=_spread_ms(visited_s),
        )


def _spread_ms(took_s: list[float]) -> tuple[float, float]:
    ordered = sorted(took_s)
    return (
        1000 * statistics.median(ordered),
        1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    )


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
    fits = result.first_page_s <= FIRST_PAGE_LIMIT_S and result.peak_mb <= MEMORY_LIMIT_MB
    return 0 if fits and result.errors == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
