"""All ranks of one node: started together, and ended together."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spotguard.errors import Detached
from spotguard.events import env
from spotguard.events.message_seal import Seal
from spotguard.launch.ranks import gathering
from spotguard.launch.ranks.gathering import FirstNode, NotGathered
from spotguard.launch.ranks.store import listening
from spotguard.launch.ranks.worker_environment import of_rank, script_command
from spotguard.shared.saves_first import LEFT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotguard.launch.ranks.plan import RankPlan

SAYS: Final = "spotguard: the script "
"""Begins what is said of a rank that failed; its script has said why before."""
_LEFT: Final = (Detached.exit_code, -signal.SIGTERM)
"""How ranks end that saved, or that were then told to leave."""
_STOPS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""What is passed on to the ranks."""
_LAST_SAVE_S: Final = 30.0
"""How long ranks that were told to end may take, before they are killed; longer if the job is told
that it has longer."""
_AFTER_SAVE_S: Final = 5.0
"""Once its time for a save is over, a rank writes down how it ended, and leaves."""
_TOLD, _FAILED, _OF_SIGNAL = 1, 1, 128
_STORE_IS_GONE: Final = "spotguard: the store in which the ranks meet has ended"


class NodeRanks:
    """The ranks of a node. Main thread only: it handles signals."""

    def __init__(self, plan: RankPlan) -> None:
        """Nothing is started yet."""
        self._plan = plan
        self._news: queue.SimpleQueue[tuple[subprocess.Popen[bytes] | None, int]] = (
            queue.SimpleQueue()
        )
        """What has ended, with its code; or None, and a signal that came."""
        self._ranks: dict[subprocess.Popen[bytes], int] = {}
        """Those that live, with their number in the whole job."""
        self._bad: list[tuple[int, int]] = []
        """Rank and code of those that failed, in the order of their ends."""
        self._is_told = self._is_ending = self._has_no_store = self._has_killed = False
        self._kill_at = math.inf

    def run(self) -> int:
        """Start the ranks and block until all have ended; return this process's exit code.

        When a rank fails, or a signal comes, all are told to end, and killed if they stay. The code
        is that of the first rank that failed, 128 and its number for a signal; and 1 if ranks
        saved and left.
        """
        for each in _STOPS:
            signal.signal(each, self._on_stop)
        try:
            with self._gathered() as (meeting_port, first_node):
                if meeting_port is not None:
                    self._start(meeting_port)
                self._wait()
                if first_node is not None and self._ended_well():
                    first_node.wait_for_others(leaves=self._has_news)
        except (NotGathered, OSError) as problem:
            self._tell(signal.SIGKILL)
            sys.stderr.write(f"spotguard: the ranks could not be started: {problem}\n")
            return _FAILED
        return self._exit_code()

    def _ended_well(self) -> bool:
        return not (self._bad or self._is_told or self._has_no_store)

    def _exit_code(self) -> int:
        codes = [code for _, code in self._bad]
        if self._is_told or (codes and all(code in _LEFT for code in codes)):
            if not self._has_killed:
                _say_left()
            return _TOLD
        if not codes:
            return _FAILED if self._has_no_store else 0
        rank, code = next(bad for bad in self._bad if bad[1] not in _LEFT)
        sys.stderr.write(f"{_words_of(code, rank if self._plan.world > 1 else None)}\n")
        if codes[0] in _LEFT:  # the others were killed, for they stayed
            return _TOLD
        return code if code > 0 else _OF_SIGNAL - code

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[tuple[int | None, FirstNode | None]]:
        """Have the port at which all ranks meet, within it; None if this node is to leave."""
        plan = self._plan
        if plan.world == 1:
            yield plan.port, None
        elif plan.node > 0:
            joined = gathering.join(
                plan.host,
                plan.port,
                plan.node,
                Seal.from_environment(),
                leaves=self._has_news,
            )
            first, meeting_port = joined or (None, None)
            with first or contextlib.nullcontext():
                yield meeting_port, None
        else:
            with self._store() as meeting_port:
                if plan.nodes == 1:
                    yield meeting_port, None
                    return
                node = FirstNode(
                    listening(plan.host, plan.port), plan.nodes, Seal.from_environment()
                )
                with contextlib.closing(node):
                    is_whole = node.gather(meeting_port, leaves=self._has_news)
                    yield meeting_port if is_whole else None, node

    @contextlib.contextmanager
    def _store(self) -> Iterator[int]:
        """Keep the store in which ranks meet, within it: a process of its own."""
        with listening(self._plan.host) as server:
            port = server.getsockname()[1]
            descriptor = server.fileno()
            keeper = subprocess.Popen(
                [sys.executable, "-m", "spotguard.launch.ranks.store", str(descriptor), str(port)],
                stdin=subprocess.PIPE,
                pass_fds=[descriptor],
                start_new_session=True,  # signals for this node's ranks are none for it
            )
        self._watch(keeper)
        try:
            yield port
        finally:
            keeper.kill()
            assert keeper.stdin is not None
            keeper.stdin.close()

    def _start(self, meeting_port: int) -> None:
        plan = self._plan
        for local_rank in range(plan.ranks):
            with contextlib.ExitStack() as files:
                out, err = self._outputs(local_rank, files)
                # A session of its own, as torchrun's: signals to this group are passed on.
                child = subprocess.Popen(
                    [sys.executable, "-u", *script_command(plan.script, os.environ)],
                    env={**os.environ, **of_rank(plan, local_rank, meeting_port)},
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            self._ranks[child] = plan.node * plan.ranks + local_rank
            self._watch(child)

    def _outputs(self, local_rank: int, files: contextlib.ExitStack) -> tuple[Any, Any]:
        """Return where a rank prints: into the files that torchrun would make, if any."""
        if self._plan.log_dir is None:
            return None, None
        folder = Path(self._plan.log_dir) / "ranks" / "attempt_0" / str(local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        out, err = (folder / f"{stream}.log" for stream in ("stdout", "stderr"))
        return files.enter_context(out.open("wb")), files.enter_context(err.open("wb"))

    def _watch(self, child: subprocess.Popen[bytes]) -> None:
        def wait() -> None:
            self._news.put((child, child.wait()))

        threading.Thread(target=wait, daemon=True).start()

    def _on_stop(self, number: int, _: object) -> None:
        self._news.put((None, number))

    def _has_news(self) -> bool:
        """Tell whether a signal came, or something ended, before the ranks began or after."""
        return not self._news.empty()

    def _wait(self) -> None:
        """Hear all news until no rank lives; who was told to end and stays is killed."""
        while self._ranks or self._has_news():
            try:
                who, number = self._news.get(timeout=self._left_s())
            except queue.Empty:
                self._has_killed = True
                self._tell(signal.SIGKILL)
                self._kill_at = math.inf
            else:
                self._hear(who, number)

    def _left_s(self) -> float | None:
        return None if self._kill_at == math.inf else max(0.0, self._kill_at - time.monotonic())

    def _hear(self, who: subprocess.Popen[bytes] | None, number: int) -> None:
        """Take note of a signal, or of an end; whatever is wrong ends all ranks."""
        if who is None:
            self._is_told = True
            self._end(number)
        elif who not in self._ranks:
            self._has_no_store = True
            sys.stderr.write(f"{_STORE_IS_GONE} (exitcode: {number})\n")
            self._end(signal.SIGTERM)
        else:
            rank = self._ranks.pop(who)
            if number != 0:
                # It ran no clean-up if it was told to stop, or lost a peer: what it has started may
                # hold a port, or a device's memory.
                _tell_session_of(who, signal.SIGTERM)
                self._bad.append((rank, number))
                self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        """Tell all ranks to end, once."""
        if not self._is_ending:
            self._is_ending = True
            self._tell(number)
            self._kill_at = time.monotonic() + _patience_s()

    def _tell(self, number: int) -> None:
        """Send a signal to the whole session of each rank that lives."""
        for child in self._ranks:
            if child.returncode is None:
                _tell_session_of(child, number)


def _tell_session_of(rank: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a rank and what it has started, or to what is left of that."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.pid, number)


def _words_of(code: int, rank: int | None) -> str:
    where = "" if rank is None else f" on rank {rank}"
    if code > 0:
        return f"{SAYS}failed{where} (exitcode: {code})"
    name = f"signal {-code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-code).name
    return f"{SAYS}died of {name}{where} (exitcode: {code})"


def _patience_s() -> float:
    """Return how long ranks that were told to end may take: no less than the job is told."""
    grace_s = _LAST_SAVE_S
    with contextlib.suppress(ValueError):  # the ranks have refused what is no number
        grace_s = max(grace_s, float(os.environ.get(env.GRACE_S) or 0.0))
    return grace_s + _AFTER_SAVE_S


def _say_left() -> None:
    """Tell the agent that no rank was torn from its work."""
    saving = os.environ.get(env.SAVING)
    if saving:
        with contextlib.suppress(OSError):
            Path(saving + LEFT).touch()
