"""A node's part of an attempt, and of the next one in place: its ranks, and its ranks again.

    python -m spotguard.launch.agent --nodes 3 --node 1 --nproc 8 --master HOST:PORT -- job.py ...

runs on each node of a cluster. When the attempt ends because other nodes leave, the nodes that
stay begin the next attempt by themselves, from the last save: no new cluster, no controller, and
the processes are fresh. `membership` is how they agree.

torchrun's own elasticity is not used: it needs half a minute and more for this, dies with the
node that hosts its rendezvous, starts a failed script anew, and asks nodes back that are being
taken.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotguard.errors import SpotguardError
from spotguard.events import env, keys
from spotguard.events.event import Event, JobEvent
from spotguard.events.masking import secrets_of
from spotguard.events.untrusted import Refused, parse_object
from spotguard.launch.cache.keeping import Owner
from spotguard.launch.cache.node import NodeCache, Wish
from spotguard.launch.logs.printed_files import LAUNCHER_FILES
from spotguard.launch.logs.shipping import Shipping
from spotguard.launch.membership import Part, next_part
from spotguard.launch.metadata import DETECT, detect
from spotguard.launch.slurm_allocation import give_back
from spotguard.shared.steady_clock import SteadyClock
from spotguard.storage import PrefixedStore, open_store
from spotguard.storage.deadline import give_up_after
from spotguard.storage.patterns.clock_comparison import seconds_ahead

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from spotguard.storage.base import ObjectStore


_TELL_S = 10.0
_LAST_LOGS_S = 10.0
"""How long the rest of what was printed may take to be stored, at the end of an attempt."""
_STUBBORN_S = 30.0
"""What was told that its time is over may need so long to end; then Slurm is asked to end it."""
_SKYPILOTS = "SKYPILOT_TASK_ID"
"""Is set in SkyPilot's tasks only; the local launcher sees exit codes itself."""


class Agent:
    """Runs ranks for as many attempts as this node has a part in. Blocks; main thread only."""

    def __init__(
        self, part: Part, *, nproc: int, script: Sequence[str], lifetime_s: float | None = None
    ) -> None:
        """After `lifetime_s` this process is told to leave by who started it, come what may."""
        self._clock = SteadyClock()
        self._is_compared = False
        self._comparing = threading.Lock()
        self._over_at = math.inf if lifetime_s is None else self._clock.monotonic() + lifetime_s
        self._part = part
        self._nproc = nproc
        self._script = script
        self._written = 0
        self._leaving = os.environ.get(env.LEAVING)
        self._told = False
        self._shipping: list[Shipping] = []
        self._cache: NodeCache | None = None
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def run(self) -> int:
        """Return the exit code of what ran the last attempt's ranks; negative for a signal."""
        given = dict(os.environ)
        if env.DOWN_AT in given and _SKYPILOTS in given:
            down_at = float(given[env.DOWN_AT])
            threading.Thread(target=self._end_in_time, args=[down_at], daemon=True).start()
        given = self._begin_cache(self._part, given)
        goes_on = ""
        while True:
            part = self._part
            logs = self._ship_logs(part, given)
            job = self._start(part, given, logs)
            if goes_on:
                self._say(goes_on)
            if self._told:  # in the moment before: it did not hear of it
                job.terminate()
            code = job.wait()
            if logs is not None:
                logs.finish(_LAST_LOGS_S)
            # SkyPilot says it later, and the same whoever is to blame.
            self._write(JobEvent.NODE_EXITED, {"exit_code": code, "told": self._told})
            following = None if code == 0 else self._next(part, given)
            if following is None or self._told:
                if self._cache is not None:
                    self._cache.finish(goes_on=code != 0)
                return code
            if self._cache is not None:
                self._cache.go_on(
                    attempt=following.attempt,
                    place=following.nodes.index(following.node),
                    places=len(following.nodes),
                )
            given = environment(given, part, following, self._clock.now())
            self._part = part = following
            goes_on = f"goes on in place as attempt {part.attempt}, on {len(part.nodes)} node(s)"

    def _start(
        self, part: Part, given: Mapping[str, str], logs: Shipping | None
    ) -> subprocess.Popen[bytes]:
        if logs is None:
            return subprocess.Popen(command_line(part, self._nproc, self._script), env=given)
        command = command_line(part, self._nproc, self._script, log_dir=logs.folder)
        # What a killed rank has in a buffer of its own would be lost.
        told = {"PYTHONUNBUFFERED": "1", **given}
        out, err = (logs.folder / name for name in LAUNCHER_FILES)
        with out.open("ab") as stdout, err.open("ab") as stderr:
            job = subprocess.Popen(command, env=told, stdout=stdout, stderr=stderr)
        logs.start()
        return job

    def _begin_cache(self, part: Part, given: dict[str, str]) -> dict[str, str]:
        """Bring cached folders back and begin to keep them; return the job's environment.

        Blocks until they are back: before the script starts, which looks for them.
        """
        wish = Wish.of(given, Path.cwd())
        for_job = {name: value for name, value in given.items() if name != env.CACHE_KEY}
        if wish is None:
            return for_job
        run_id, store_url = given[env.RUN_ID], given[env.STORE]
        owner = Owner(
            about=run_id,
            key=wish.key,
            attempt=part.attempt,
            node=part.node,
            place=part.nodes.index(part.node),
            places=len(part.nodes),
        )
        self._cache = cache = NodeCache(
            wish,
            owner,
            lambda: PrefixedStore(open_store(store_url), run_id),
            secrets=secrets_of(given),
            clock=self._clock,
            told=self._is_leaving,
            say=_say,
        )
        began = self._clock.monotonic()
        restored = cache.restore()
        if restored.files or restored.problems:
            told = {
                "from_attempt": restored.attempt,
                "files": restored.files,
                "size_bytes": restored.size_bytes,
                "duration_s": round(self._clock.monotonic() - began, 3),
                "problems": len(restored.problems),
            }
            self._report(JobEvent.CACHE_RESTORED, told)
        return {**for_job, **wish.told_to_job(given), **cache.start()}

    def _is_leaving(self) -> bool:
        return self._told or bool(self._leaving and Path(self._leaving).exists())

    def _ship_logs(self, part: Part, given: Mapping[str, str]) -> Shipping | None:
        """Return what ships the attempt's logs; None if there is no run store to ship them to."""
        run_id, store_url = given.get(env.RUN_ID), given.get(env.STORE)
        if not run_id or not store_url:
            return None

        def opened() -> ObjectStore:
            store = PrefixedStore(open_store(store_url), run_id)
            self._compare_clocks(store)
            return store

        try:
            logs = Shipping(
                opened,
                url=store_url,
                attempt=part.attempt,
                node=part.node,
                first_rank=part.nodes.index(part.node) * self._nproc,
                nproc=self._nproc,
                secrets=secrets_of(given),
                clock=self._clock,
            )
        except OSError as problem:  # no room on this node: the job may do without
            _say(f"what this node prints is not kept in the run store: {problem}")
            return None
        self._shipping.append(logs)
        return logs

    def close_logs(self) -> None:
        """Block until what was printed is stored, for some seconds at most."""
        for logs in self._shipping:
            if not logs.join():
                _say("the last lines that this node printed could not be stored")

    def _end_in_time(self, down_at: float) -> None:
        """Tell this node's whole process group to end when the nodes are to go, as `timeout` does.

        That one counts from the job's start, when nodes and set-up have been paid for a while.
        On Slurm the allocation is given back even if the job is frozen: SkyPilot's own guard was
        seen to need up to four minutes.
        """
        try:
            with give_up_after(_TELL_S):
                store = open_store(os.environ[env.STORE])
                self._compare_clocks(PrefixedStore(store, os.environ[env.RUN_ID]))
        except SpotguardError as problem:
            _say(f"this node's clock could not be compared: {problem}")
        left_s = max(0.0, down_at - self._clock.now())
        self._over_at = min(self._over_at, self._clock.monotonic() + left_s)
        self._clock.sleep(left_s)
        self._say("the time of this attempt is over")
        os.killpg(os.getpgrp(), signal.SIGTERM)
        self._clock.sleep(_STUBBORN_S)
        self.leave()

    def leave(self) -> None:
        """Do what is to be done when this node's part is over. Blocks, on Slurm for a minute."""
        allocation = os.environ.get(env.ALLOCATION)
        if allocation and give_back(
            allocation, told=lambda: self._told, over_at=self._over_at, clock=self._clock
        ):
            self._write(JobEvent.GIVEN_BACK, {"allocation": allocation})

    def _next(self, part: Part, given: Mapping[str, str]) -> Part | None:
        run_id, store_url = given.get(env.RUN_ID), given.get(env.STORE)
        if not run_id or not store_url or env.NODES_MIN not in given:
            return None
        try:
            store = PrefixedStore(open_store(store_url), run_id)
            self._compare_clocks(store)
            return next_part(
                store,
                part,
                leaves=self._is_leaving(),
                nodes_min=int(given[env.NODES_MIN]),
                clock=self._clock,
            )
        except SpotguardError as problem:
            _say(f"this node does not go on in place: {problem}")
            return None

    def _compare_clocks(self, store: ObjectStore) -> None:
        """Live by the controller's clock from here on, as the job does: what is agreed has times.

        Raises:
            StoreError: the store cannot be used.
        """
        theirs = os.environ.get(env.CLOCK)
        with self._comparing:
            if theirs is None or self._is_compared:
                return
            mine = keys.clock(self._part.attempt, node=self._part.node, rank=keys.AGENT_RANK)
            self._clock.turn_back(seconds_ahead(store, theirs, mine, self._clock) or 0.0)
            self._is_compared = True

    def _write(self, kind: JobEvent, data: dict[str, Any]) -> None:
        """Write down what only this node knows; in SkyPilot's tasks, others are seen anyway."""
        if _SKYPILOTS in os.environ:
            self._report(kind, data)

    def _report(self, kind: JobEvent, data: dict[str, Any]) -> None:
        """Write an event of this node's into the run store; what fails is said here."""
        run_id, store_url = os.environ.get(env.RUN_ID), os.environ.get(env.STORE)
        if not run_id or not store_url:
            return
        self._written += 1
        part, count = self._part, self._written
        try:
            with give_up_after(_TELL_S):
                store = PrefixedStore(open_store(store_url), run_id)
                self._compare_clocks(store)
                event = Event(
                    kind=kind.value,
                    at=self._clock.now(),
                    attempt=part.attempt,
                    node=part.node,
                    rank=keys.AGENT_RANK,
                    data=data,
                )
                key = keys.event(
                    part.attempt, at=event.at, node=part.node, rank=event.rank, count=count
                )
                store.put(key, event.to_json())
        except SpotguardError as problem:
            _say(f"{kind.value} could not be written down: {problem}")

    def _say(self, words: str) -> None:
        """Say something, and have it in the log of the attempt that goes on."""
        _say(words)
        if self._shipping:
            self._shipping[-1].note(f"spotguard: {words}")

    def _on_sigterm(self, *_: Any) -> None:
        """Stay: the job saves first. Whoever ends a node tells its whole process group."""
        self._told = True


def command_line(
    part: Part, nproc: int, script: Sequence[str], *, log_dir: Path | None = None
) -> list[str]:
    """Return what starts the job on a node; below `log_dir` each rank prints into its own files."""
    to_files = [] if log_dir is None else ["--redirects=3", f"--log-dir={log_dir}"]
    return [
        sys.executable,
        *("-m", "spotguard.launch.ranks"),
        f"--nnodes={len(part.nodes)}",
        f"--node-rank={part.nodes.index(part.node)}",
        f"--nproc-per-node={nproc}",
        f"--master-addr={part.host}",
        f"--master-port={part.port}",
        "--max-restarts=0",
        *to_files,
        *script,
    ]


def _claim(given: Mapping[str, str]) -> dict[str, Any]:
    """Return what the launcher knew; a variable that makes no sense tells nothing."""
    try:
        return parse_object(given.get(env.CLAIM) or "{}", "the claim")
    except Refused:
        return {}


def environment(
    given: Mapping[str, str], part: Part, following: Part, now: float
) -> dict[str, str]:
    """Return what the job is told in the attempt that follows: fewer nodes' money lasts longer."""
    claim = _claim(given)
    told = {
        **given,
        env.ATTEMPT: str(following.attempt),
        env.CLAIM: json.dumps({**claim, "nodes": len(following.nodes), "intended_at": now}),
    }
    told.pop(env.NODE_UP_AT, None)  # that was for the attempt before
    if env.BUDGET_STOP_AT in given:
        left_s = float(given[env.BUDGET_STOP_AT]) - now
        told[env.BUDGET_STOP_AT] = str(now + left_s * len(part.nodes) / len(following.nodes))
    return told


def _say(words: str) -> None:
    sys.stderr.write(f"spotguard: {words}\n")
    sys.stderr.flush()


def _remove(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _end_like(code: int) -> None:
    """End in the same way, also by a signal: whoever looks at this process must see the same."""
    if code >= 0:
        sys.exit(code)
    with contextlib.suppress(OSError):  # SIGKILL has no handler
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a node's part; exits as what ran its last ranks did."""
    parser = argparse.ArgumentParser(prog="python -m spotguard.launch.agent")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--nproc", type=int, required=True)
    parser.add_argument("--master", required=True, metavar="HOST:PORT")
    parser.add_argument("--lifetime", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--place", type=Path, metavar="FOLDER")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    host, _, port = given.master.rpartition(":")
    part = Part(
        attempt=int(os.environ.get(env.ATTEMPT, "1")),
        node=given.node,
        nodes=tuple(range(given.nodes)),
        host=host,
        port=int(port),
    )
    if os.environ.get(env.METADATA) == DETECT:
        os.environ[env.METADATA] = detect()
    os.environ.setdefault(env.NODE_UP_AT, str(time.time()))
    script = given.script[1:] if given.script[:1] == ["--"] else given.script
    agent = Agent(part, nproc=given.nproc, script=script, lifetime_s=given.lifetime or None)
    code = agent.run()
    agent.close_logs()
    # A node that stays would keep a checkpoint and an environment, from which this one runs.
    _remove(given.place and given.place / "checkpoints")
    agent.leave()
    _remove(given.place)
    _end_like(code)


if __name__ == "__main__":
    main()
