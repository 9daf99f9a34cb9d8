"""Kills a node, its agent or a rank that prints, at a random moment, and looks at what is stored.

The agent and what starts the ranks are the real ones, in a process group of their own. Everything
that is drawn comes from the seed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from spotguard.control.journal.stored.logs import LogQuery, StoredLog
from spotguard.events import env
from spotguard.storage import PrefixedStore, open_store

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.control.journal.stored.logs import LogLine

VICTIMS = ("node", "agent", "rank")
RANKS = (0, 1, 2)
LOST_S = 5.0
LATE_S = 3.0
"""A machine with more to do than it can is late with everything."""
_START_S = 60.0
_SCRIPT = """
import random, sys, time
seed, pause_s, longest = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
chance = random.Random(seed)
number = 0
while True:
    print(number, time.time(), "x" * chance.randrange(longest))
    number += 1
    time.sleep(pause_s)
"""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Whom to kill, when, and what is printed until then."""

    seed: int
    victim: str
    after_s: float
    """From the first line that is stored."""
    pause_s: float
    """Between two lines of a rank."""
    longest: int
    """Characters of a line, at most."""

    @classmethod
    def drawn(cls, seed: int, *, victim: str | None = None, within_s: float = 12.0) -> Kill:
        """Return a random one."""
        chance = random.Random(seed)
        return cls(
            seed=seed,
            victim=victim or chance.choice(VICTIMS),
            after_s=chance.uniform(0.0, within_s),
            pause_s=chance.choice((0.1, 0.01, 0.01, 0.002)),
            longest=chance.choice((1, 80, 4000)),
        )


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What came of it."""

    lost_s: float
    """Of what was printed last, of the rank that lost more."""
    lines: int
    wrong: tuple[str, ...]
    """What must not be, in words."""


def play(kill: Kill, folder: Path) -> Loss:
    """Start a node, kill, and say what was lost; blocks for seconds."""
    agent = _start(folder, kill)
    family: list[psutil.Process] = []
    follower, followed = _reader(folder), list[tuple[int | None, str]]()
    try:
        _follow(follower, followed, _START_S, until_any=True)
        family = psutil.Process(agent.pid).children(recursive=True)
        _follow(follower, followed, kill.after_s)
        killed_at = time.time()
        _strike(kill.victim, agent, family)
        agent.wait(60)
    finally:
        for each in family:
            if each.is_running():
                each.kill()
        if agent.poll() is None:
            agent.kill()
            agent.wait()
    followed += _read(follower, final=True)
    return _judged(kill, _read(_reader(folder), final=True), followed, killed_at)


def _start(folder: Path, kill: Kill) -> subprocess.Popen[bytes]:
    """Start an agent of ranks that print for ever."""
    (folder / "job.py").write_text(_SCRIPT)
    others = ("SPOTGUARD_", "SKYPILOT_")
    told = {env.RUN_ID: "job-1", env.STORE: str(folder / "store"), env.ATTEMPT: "1"}
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "spotguard.launch.agent", "--nodes=1", "--node=0"),
            *(f"--nproc={len(RANKS)}", "--master=127.0.0.1:1", "--", "job.py"),
            *(str(kill.seed), str(kill.pause_s), str(kill.longest)),
        ],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={
            **{k: v for k, v in os.environ.items() if not k.startswith(others)},
            **told,
            "TMPDIR": str(folder),
        },
    )


def _strike(victim: str, agent: subprocess.Popen[bytes], family: list[psutil.Process]) -> None:
    if victim == "node":
        for each in (psutil.Process(agent.pid), *family):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    elif victim == "agent":
        agent.kill()
    else:
        ranks = [each for each in family if _is_rank(each)]
        ranks[0].kill()
        for other in ranks[1:]:
            other.send_signal(signal.SIGTERM)


def _is_rank(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # the node asks other programs for a moment
        return "job.py" in process.cmdline()[1:3]
    return False


def _reader(folder: Path) -> StoredLog:
    store = PrefixedStore(open_store(str(folder / "store")), "job-1")
    return StoredLog(store, 1, LogQuery())


def _read(reader: StoredLog, *, final: bool) -> list[tuple[int | None, str]]:
    lines: list[LogLine] = list(reader.lines(failed=True, final=final))
    return [(line.rank, line.text) for line in lines]


def _follow(
    reader: StoredLog,
    followed: list[tuple[int | None, str]],
    seconds: float,
    *,
    until_any: bool = False,
) -> None:
    """Read on for so long, as `logs -f` does."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not (until_any and followed):
        followed += _read(reader, final=False)
        time.sleep(min(0.2, max(0.0, until - time.monotonic())))


def _judged(
    kill: Kill,
    stored: list[tuple[int | None, str]],
    followed: list[tuple[int | None, str]],
    killed_at: float,
) -> Loss:
    wrong, lost_s = list[str](), 0.0
    allowed_s = LATE_S + (LOST_S if kill.victim != "rank" else 1.0)
    for rank in RANKS:
        told = [text.split() for who, text in stored if who == rank]
        if not told:
            wrong.append(f"nothing is stored of rank {rank}")
            continue
        if [int(number) for number, *_ in told] != list(range(len(told))):
            wrong.append(f"rank {rank}: a line is missing, told twice, or out of its order")
        rank_lost_s = killed_at - float(told[-1][1])
        lost_s = max(lost_s, rank_lost_s)
        if rank_lost_s > allowed_s:
            wrong.append(f"rank {rank}: {rank_lost_s:.1f} s are lost")
        if [text for who, text in followed if who == rank] != [
            text for who, text in stored if who == rank
        ]:
            wrong.append(f"rank {rank}: who followed was told something else")
    return Loss(lost_s=lost_s, lines=len(stored), wrong=tuple(wrong))
