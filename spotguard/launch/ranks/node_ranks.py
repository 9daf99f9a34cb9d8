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
from spotguard.shared.node_locks import LEFT, RankLife

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
_LOOK_S: Final = 0.1
"""Between looks whether a rank lives on whose first process has ended."""
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
        self._ranks: dict[subprocess.Popen[bytes], _Rank] = {}
        """Those that live, by the first of their processes."""
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
                out, err, told = self._outputs(local_rank, files)
                # A session of its own, as torchrun's: signals to this group are passed on.
                child = subprocess.Popen(
                    [sys.executable, "-u", *script_command(plan.script, os.environ)],
                    env={**os.environ, **of_rank(plan, local_rank, meeting_port), **told},
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
            life = RankLife(Path(told[env.RANK_FILE])) if told else None
            rank = _Rank(child, plan.node * plan.ranks + local_rank, life)
            self._ranks[child] = rank
            self._watch(rank)

    def _outputs(
        self, local_rank: int, files: contextlib.ExitStack
    ) -> tuple[Any, Any, dict[str, str]]:
        """Return where a rank prints, into the files that torchrun would make, and says it lives.

        Without a folder for that it prints where this process does.
        """
        if self._plan.log_dir is None:
            return None, None, {}
        folder = Path(self._plan.log_dir) / "ranks" / "attempt_0" / str(local_rank)
        folder.mkdir(parents=True, exist_ok=True)
        out, err = (folder / f"{stream}.log" for stream in ("stdout", "stderr"))
        told = {env.RANK_FILE: str(folder / "lives")}
        return files.enter_context(out.open("wb")), files.enter_context(err.open("wb")), told

    def _watch(self, watched: subprocess.Popen[bytes] | _Rank) -> None:
        child = watched.first if isinstance(watched, _Rank) else watched

        def wait() -> None:
            self._news.put((child, watched.wait()))

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
                rank.tell(signal.SIGTERM)
                self._bad.append((rank.number, number))
                self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        """Tell all ranks to end, once."""
        if not self._is_ending:
            self._is_ending = True
            self._tell(number)
            self._kill_at = time.monotonic() + _patience_s()

    def _tell(self, number: int) -> None:
        """Send a signal to the whole session of each rank that lives."""
        for rank in self._ranks.values():
            if not rank.has_ended:
                rank.tell(number)


class _Rank:
    """A rank of this node: the process that was started for it, and the one that trains.

    They are two where the script is a wrapper: `subprocess.call`, a pipe into `tee`, `uv run`. A
    signal to all of them ends the wrapper at once, while the other one saves.
    """

    def __init__(self, first: subprocess.Popen[bytes], number: int, life: RankLife | None) -> None:
        self.first = first
        self.number = number
        """Its number in the whole job."""
        self.has_ended = False
        self._life = life

    def wait(self) -> int:
        """Block until both have ended; return the code of the first, or that this rank has left."""
        code = self.first.wait()
        if self._life is not None:
            while self._life.pid is not None:
                time.sleep(_LOOK_S)
            if self._life.has_left:
                code = Detached.exit_code
        self.has_ended = True
        return code

    def tell(self, number: int) -> None:
        """Send a signal to it and what it has started, or to what is left of that."""
        _signal(os.killpg, self.first.pid, number)
        trains = None if self._life is None else self._life.pid
        if trains is not None and _session_of(trains) != self.first.pid:
            _signal(os.kill, trains, number)


def _session_of(pid: int) -> int | None:
    with contextlib.suppress(ProcessLookupError):  # it may end at any moment
        return os.getsid(pid)
    return None


def _signal(send: Callable[[int, int], None], whom: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(whom, number)


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
