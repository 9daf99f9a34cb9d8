"""Plays draws beside one another, and each script's undisturbed runs once."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tests.property.draw import Draw, Life, drawn
from tests.property.moments import at_hand
from tests.property.play import Play
from tests.property.scripts import SERVERS, corpus
from tests.property.verdict import (
    End,
    end_of,
    refusal_in,
    wrong_at_the_end,
    wrong_on_the_way,
)
from tests.runtime.harness.processes import Zygote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.property.scripts import Script

AGAIN = 4
"""How often a draw that disturbed nothing is drawn anew."""


@dataclass
class Result:
    """What came of one draw."""

    draw: Draw
    wrong: list[str] = field(default_factory=list)
    kinds: list[tuple[str, str, int]] = field(default_factory=list)
    """Of each attempt that was struck: the blow, its moment, the ranks."""
    ends: Counter[str] = field(default_factory=Counter)
    too_late: int = 0
    """Draws before it, of the same number, that disturbed nothing."""
    seconds: float = 0.0
    promise: str = ""
    folder: Path | None = None

    @property
    def disturbed(self) -> bool:
        """True if something struck it."""
        return bool(self.kinds)


class Servers:
    """Fork servers by what they have loaded, each begun when it is first needed."""

    def __init__(self) -> None:
        self._made: dict[str, Zygote] = {}
        self._lock = threading.Lock()

    def of(self, name: str) -> Zygote:
        """Return the server of that name."""
        with self._lock:
            if name not in self._made:
                self._made[name] = Zygote(*SERVERS[name])
            return self._made[name]

    def close(self) -> None:
        """End all."""
        for server in self._made.values():
            server.close()


class Runner:
    """Plays draws in a folder; undisturbed runs are played once."""

    def __init__(self, folder: Path, servers: Servers, *, bug: str = "") -> None:
        self._folder = folder
        self._servers = servers
        self._bug = bug
        self._calm: dict[tuple[str, int, int], End | list[str]] = {}
        self._locks: dict[tuple[str, int, int], threading.Lock] = {}
        self._lock = threading.Lock()
        self._plays = 0

    # ------------------------------------------------------------------ undisturbed

    def calm(self, script: Script, world: int, leave_at: float = 0.0) -> End | list[str]:
        """Return the end of the undisturbed run, or what is wrong with it."""
        key = (script.name, world, round(100 * leave_at))
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._calm:
                self._calm[key] = self._played_calm(script, world, leave_at)
            return self._calm[key]

    def _played_calm(self, script: Script, world: int, leave_at: float) -> End | list[str]:
        steps = 0
        if leave_at:
            whole = self.calm(script, world)
            if isinstance(whole, list):
                return whole
            steps = len(whole.samples)
        draw = Draw(script=script.name, lives=(Life(world=world),), leave_at=leave_at)
        began = time.monotonic()
        play = self._played(draw, script, {}, steps)
        if play.hangs:
            return [f"undisturbed on {world} ranks: {play.hangs}"]
        [attempt] = play.attempts
        if script.refused:
            return self._judged_refusal(script, attempt.said, attempt.codes)
        wrong = wrong_on_the_way(play)
        if wrong:
            return [f"undisturbed on {world} ranks: {what}" for what in wrong]
        end = end_of(play.folder, 1, world)
        end.seconds = time.monotonic() - began
        first = script.worlds[0]
        if world != first and not leave_at:
            if script.elastic in ("refused", "first"):
                shutil.rmtree(play.folder)
                return end
            one = self.calm(script, first)
            if isinstance(one, list):
                return one
            wrong = wrong_at_the_end(script, end, one, same_world=False)
            if wrong:
                return [f"undisturbed on {world} ranks, beside {first}: {what}" for what in wrong]
        shutil.rmtree(play.folder)
        return end

    def _judged_refusal(self, script: Script, said: list[str], codes: list[int]) -> list[str]:
        if any(script.refused in refusal_in(words) for words in said) and all(codes):
            return []
        return [f"it is not refused by a sentence with {script.refused!r}: {codes}"]

    # ------------------------------------------------------------------ disturbed

    def play(self, draw: Draw) -> Result:
        """Play one draw and judge it."""
        script = corpus()[draw.script]
        began = time.monotonic()
        result = Result(draw)
        worlds = {life.world for life in draw.lives}
        calm = {world: self.calm(script, world) for world in sorted(worlds | {script.worlds[0]})}
        bad = [end for end in calm.values() if isinstance(end, list)]
        if script.refused:
            result.wrong = [what for end in bad for what in end]
            result.ends["refused" if not result.wrong else "not refused"] += 1
            return result
        if bad:
            result.wrong = bad[0]
            return result
        ends: dict[int, End] = {w: end for w, end in calm.items() if isinstance(end, End)}
        counts = {world: end.counts for world, end in ends.items()}
        steps = len(next(iter(ends.values())).samples)
        play = self._played(draw, script, counts, steps)
        result.folder = play.folder
        result.wrong = wrong_on_the_way(play)
        self._tell_ends(play, result)
        if not result.wrong:
            self._compare(play, script, result)
        result.seconds = time.monotonic() - began
        if not result.wrong:
            shutil.rmtree(play.folder)
        return result

    def _compare(self, play: Play, script: Script, result: Result) -> None:
        last = play.attempts[-1]
        worlds = {attempt.life.world for attempt in play.attempts}
        same = len(worlds) == 1
        if not same and script.elastic == "refused":
            return
        first = play.began_on if script.elastic == "first" else script.worlds[0]
        world = last.life.world if same else first
        calm = self.calm(script, world, play.draw.leave_at)
        if isinstance(calm, list):
            result.wrong = calm
            return
        result.promise = "bits" if same else script.elastic
        ours = end_of(play.folder, last.number, last.life.world)
        result.wrong = wrong_at_the_end(script, ours, calm, same_world=same)

    def _tell_ends(self, play: Play, result: Result) -> None:
        for attempt in play.attempts:
            life = attempt.life
            if attempt.struck:
                what = life.kind if attempt.was_at >= 0 or not life.fault else f"store {life.fault}"
                result.kinds.append((what or f"store {life.fault}", life.at, life.world))
            for end in attempt.ends or [{"reason": "finished" if attempt.finished else "silent"}]:
                result.ends[str(end["reason"])] += 1

    def _played(self, draw: Draw, script: Script, counts: Any, steps: int) -> Play:
        with self._lock:
            self._plays += 1
            folder = self._folder / f"{self._bug}{self._plays:05d}"
        folder.mkdir()
        server = self._servers.of(script.server)
        play = Play(draw, script, folder, server, counts, steps, bug=self._bug)
        play.run()
        return play

    # ------------------------------------------------------------------ draws

    def draw(self, seed: int, number: int, scripts: Sequence[Script], again: int = 0) -> Draw:
        """Return a draw whose moments its script has."""
        draw = drawn(seed, number, scripts, again)
        script = corpus()[draw.script]
        if script.refused:
            return replace(draw, lives=(Life(world=draw.lives[0].world),))

        def fitting(life: Life) -> Life:
            end = self.calm(script, life.world)
            if not life.kind or isinstance(end, list):
                return life
            counts = end.counts[min(life.victim, len(end.counts) - 1)]
            return replace(life, at=at_hand(life.at, counts, life.place, life.kind, draw.save))

        return replace(draw, lives=tuple(fitting(life) for life in draw.lives))

    def one(self, seed: int, number: int, scripts: Sequence[Script]) -> Result:
        """Play one draw, anew while nothing disturbs it."""
        late = 0
        while True:
            result = self.play(self.draw(seed, number, scripts, late))
            idle = not (result.disturbed or result.wrong or corpus()[result.draw.script].refused)
            if not idle or late == AGAIN:
                result.too_late = late
                return result
            late += 1

    def many(
        self,
        seed: int,
        numbers: Sequence[int],
        scripts: Sequence[Script],
        *,
        beside: int,
        until: Callable[[], bool] = lambda: False,
    ) -> Iterator[Result]:
        """Yield what came of each draw as it ends, `beside` of them at one time."""
        with ThreadPoolExecutor(beside) as pool:

            def guarded(number: int) -> Result | None:
                return None if until() else self.one(seed, number, scripts)

            for done in as_completed([pool.submit(guarded, number) for number in numbers]):
                if (result := done.result()) is not None:
                    yield result
