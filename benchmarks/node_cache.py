"""What a second attempt waits for, with and without caches: `python -m benchmarks.node_cache`.

The job tokenises the Python standard library's own source into `~/.cache/tokens` unless that is
there, and compiles a small model with `torch.compile`. Each attempt has a new home, as a new node
has a new disk; the run store is a folder. Measured is the time from the start of the node's agent
until the first optimizer step is done, and how much of it the restore took.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from spotguard.events import env
from spotguard.shared.cache_folders import COMPILED
from spotguard.shared.net import free_port

LEAVES_SAVED = 75
JOB = f"""
import json, os, sys, sysconfig, time, tokenize
from pathlib import Path
began = time.monotonic()
kept = Path.home() / ".cache/tokens/words.json"
if not kept.exists():
    words = {{}}
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        with tokenize.open(path) as file:
            for each in tokenize.generate_tokens(file.readline):
                words[each.string] = words.get(each.string, 0) + 1
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(words))
data_s = time.monotonic() - began
import torch
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64))
optimizer = torch.optim.AdamW(model.parameters())
compiled = torch.compile(model)
began = time.monotonic()
compiled(torch.randn(8, 64)).square().mean().backward()
optimizer.step()
hits = torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]
told = {{"data_s": data_s, "first_step_s": time.monotonic() - began, "hits": hits}}
Path(os.environ["TOLD"]).write_text(json.dumps({{**told, "done_at": time.time()}}))
sys.exit({LEAVES_SAVED})
"""


class Attempt(NamedTuple):
    """Seconds of one attempt."""

    total_s: float
    """From the agent's start until the first step is done."""
    data_s: float
    first_step_s: float
    hits: int
    """Graphs that `torch.compile` found ready."""


def attempt(folder: Path, number: int, *, cached: bool) -> Attempt:
    """Run one attempt on a node with a new disk."""
    home = folder / f"home-{number}"
    home.mkdir()
    told = folder / f"told-{number}.json"
    job = folder / "job.py"
    job.write_text(JOB)
    wish = {"folders": ["~/.cache/tokens", COMPILED], "most_bytes": 10**10}
    temporary = folder / f"tmp-{number}"  # torch's own place for it lies there
    temporary.mkdir()
    given = {
        **os.environ,
        "HOME": str(home),
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "TMPDIR": str(temporary),
        "TOLD": str(told),
        env.RUN_ID: "bench",
        env.STORE: str(folder / "store"),
        env.ATTEMPT: str(number),
        **({env.CACHE: json.dumps(wish), env.CACHE_KEY: secrets_of(folder)} if cached else {}),
    }
    agent = [sys.executable, "-m", "spotguard.launch.agent", "--nodes=1", "--node=0", "--nproc=1"]
    began = time.time()
    subprocess.run(
        [*agent, f"--master=127.0.0.1:{free_port()}", "--", str(job)],
        env=given,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    found = json.loads(told.read_text())
    return Attempt(found["done_at"] - began, found["data_s"], found["first_step_s"], found["hits"])


def secrets_of(folder: Path) -> str:
    """Return the run's key."""
    place = folder / "cache.key"
    if not place.exists():
        place.write_text(secrets.token_hex(32))
    return place.read_text()


def main() -> None:
    """Print a table: medians and spread over rounds, both ways in each of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[Attempt]] = {"first attempt": [], "second, without": []}
    seconds["second, with"] = []
    for _ in range(rounds):
        for cached, name in ((False, "second, without"), (True, "second, with")):
            with tempfile.TemporaryDirectory(prefix="spotguard-cache-") as folder:
                first = attempt(Path(folder), 1, cached=cached)
                seconds["first attempt"].append(first)
                seconds[name].append(attempt(Path(folder), 2, cached=cached))
    sys.stdout.write("| attempt | until its first step is done | data | compiled step | hits |\n")
    sys.stdout.write("|---|---|---|---|---|\n")
    for name, found in seconds.items():
        cells = [_spread([getattr(each, field) for each in found]) for field in Attempt._fields[:3]]
        sys.stdout.write(f"| {name} | {' | '.join(cells)} | {found[-1].hits} |\n")
    sys.stdout.write(f"\nload average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} s [{min(values):.1f}..{max(values):.1f}]"


if __name__ == "__main__":
    main()
