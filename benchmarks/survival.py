"""The survival matrix: how often a two-rank torchrun job ends saved and complete.

    python -m benchmarks.survival --tries 20

Each try starts a job, waits until it trains, hurts it, and then asks the run store: is there a
checkpoint of the last finished step, and does every byte of it verify? Cells:

    both            SIGTERM to both ranks, as torchrun forwards it
    both+workers    the same, with two DataLoader workers per rank, which are signalled too
    one             SIGTERM to one rank only: the other must hear of it
    killed          kill -9 of one rank: the survivor saves alone
    frozen          one rank is stopped (SIGSTOP), the other gets the SIGTERM while it hangs
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from spotguard.checkpoint.lineage import latest_valid
from spotguard.checkpoint.manifest import check_shards_intact
from spotguard.events import env, keys
from spotguard.events.event import Event
from spotguard.storage import FileStore, PrefixedStore

CELLS = ("both", "both+workers", "one", "killed", "frozen")
JOB = Path(__file__).parent / "survival_job.py"


@dataclass(frozen=True)
class Outcome:
    """How one try ended."""

    saved: bool
    steps_lost: int
    seconds: float
    """From the blow to the job's last word."""
    detail: str = ""


def attempt(cell: str, chance: random.Random) -> Outcome:
    """Run one job, hurt it as `cell` says, and return what is left of it."""
    with tempfile.TemporaryDirectory(prefix="survival-") as folder:
        store = PrefixedStore(FileStore(folder), "try")
        job = _start(folder, workers=2 if cell == "both+workers" else 0)
        try:
            ranks = _wait_training(job, Path(folder, "progress"))
            time.sleep(chance.uniform(0.3, 1.5))
            struck_at = time.time()
            _strike(cell, ranks, chance)
            job.wait(60)
        except (TimeoutError, subprocess.TimeoutExpired) as problem:
            return Outcome(saved=False, steps_lost=-1, seconds=60.0, detail=str(problem))
        finally:
            _bury(job)
        return _judge(store, struck_at)


def _start(folder: str, *, workers: int) -> subprocess.Popen[bytes]:
    variables = {
        **os.environ,
        env.STORE: folder,
        env.RUN_ID: "try",
        env.ATTEMPT: "1",
        env.GRACE_S: "15",
        env.SAVE_EVERY: "10000 steps",
        env.PROGRESS: str(Path(folder) / "progress"),
        "OMP_NUM_THREADS": "1",
        "WORKERS": str(workers),
    }
    Path(folder, "progress").write_bytes(bytes(16))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.Popen(
        [*command, "--nproc-per-node", "2", str(JOB)],
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _wait_training(job: subprocess.Popen[bytes], progress: Path) -> list[psutil.Process]:
    """Return the two ranks, first rank first, once both are past their first steps."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if int.from_bytes(progress.read_bytes()[:8], "little") >= 3:
            ranks = [p for p in psutil.Process(job.pid).children() if "RANK" in p.environ()]
            return sorted(ranks, key=lambda p: int(p.environ()["RANK"]))
        if job.poll() is not None:
            raise TimeoutError("the job ended before it trained")
        time.sleep(0.05)
    raise TimeoutError("the job never began to train")


def _strike(cell: str, ranks: list[psutil.Process], chance: random.Random) -> None:
    if cell.startswith("both"):
        for rank in ranks:
            for process in (*rank.children(recursive=True), rank):
                process.send_signal(signal.SIGTERM)
        return
    victim = chance.randrange(2)
    if cell == "one":
        ranks[victim].send_signal(signal.SIGTERM)
    elif cell == "killed":
        ranks[victim].kill()
    elif cell == "frozen":
        ranks[victim].suspend()
        time.sleep(0.5)  # the other is in the collective by now
        ranks[1 - victim].send_signal(signal.SIGTERM)


def _judge(store: PrefixedStore, struck_at: float) -> Outcome:
    manifest, skipped = latest_valid(store, verify=check_shards_intact)
    events = [Event.from_json(store.get(info.key)) for info in store.list(keys.events(1))]
    ended = next((event for event in events if event.kind == "ended"), None)
    if manifest is None or ended is None or skipped:
        return Outcome(saved=False, steps_lost=-1, seconds=-1, detail=f"{skipped or 'no end'}")
    lost = int(ended.data["step"]) - manifest.step
    return Outcome(saved=lost == 0, steps_lost=lost, seconds=ended.at - struck_at)


def _bury(job: subprocess.Popen[bytes]) -> None:
    try:
        family = [*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        if process.is_running():
            process.kill()
    job.wait(10)


def main() -> None:
    """Run all cells and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tries", type=int, default=20)
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    table: dict[str, list[Outcome]] = {}
    for cell in options.cells.split(","):
        for _ in range(options.tries):
            table.setdefault(cell, []).append(attempt(cell, chance))
        outcomes = table[cell]
        seconds = sorted(o.seconds for o in outcomes)
        print(
            f"{cell:14} saved {sum(o.saved for o in outcomes):3}/{len(outcomes):<3} "
            f"seconds to the last word {seconds[len(seconds) // 2]:.2f} "
            f"[{seconds[0]:.2f} .. {seconds[-1]:.2f}] "
            f"load {os.getloadavg()[0]:.2f}  {[o.detail for o in outcomes if not o.saved] or ''}",
            flush=True,
        )
    if options.json:
        plain = {cell: [o.__dict__ for o in outcomes] for cell, outcomes in table.items()}
        options.json.write_text(json.dumps(plain, indent=1))


if __name__ == "__main__":
    main()
