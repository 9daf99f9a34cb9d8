"""`FakeJob`: a training job that exists only as the events it writes. Plays on a `FakeLauncher`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spotguard.events import env, keys
from spotguard.events.event import Event, Heartbeat, JobEvent
from spotguard.events.regrouping import Group
from spotguard.events.states import EndReason
from spotguard.launch.base import NodeEnd
from spotguard.shared.units import to_iso

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spotguard.storage.base import ObjectStore
    from spotguard.testing.launcher import FakeCluster


@dataclass(frozen=True, kw_only=True)
class JobFate:
    """What happens to one attempt, `at_s` seconds after its launch.

    `how` is one of

    - `notice`: the cloud announces the end; the job saves, says `preempted` and leaves;
    - `grace`: the same, but the job trains on for `for_s` seconds, up to the announced end;
    - `withdraw`: the cloud announces the end for `for_s` seconds later and takes that back then;
      the job trains on all the time;
    - `deaf`: the same, but nobody takes it back;
    - `vanish`: the cloud announces the end, and all nodes are gone then without another word;
    - `term`: the same as `notice`, without an announcement;
    - `lose`: the first `nodes` nodes vanish without a word; the others hang;
    - `lose_and_tell`: the same, but the others save, say `node_lost` and leave;
    - `fail`: the script raises, says so and ends with exit code 1;
    - `exit`: the script ends with `exit_code` and says nothing;
    - `silence`: it trains on, but nothing more is written until `for_s` seconds have passed;
    - `stuck`: it hangs, heartbeats go on, and it hears no request to stop.

    With `regroup_s`, the job of all but the first `nodes` nodes goes on in place so much later.
    """

    how: str
    at_s: float
    nodes: int = 1
    exit_code: int = 1
    for_s: float = 60.0
    regroup_s: float | None = None


@dataclass
class _Play:
    """Where one attempt's job is."""

    attempt: int
    nodes: tuple[int, ...]
    begun_at: float
    at: float
    """When the next thing happens."""
    started: bool = False
    over: bool = False
    hung: bool = False
    met_fate: bool = False
    silent_until: float = 0.0
    announced_until: float | None = None
    step: int = 0
    first_step: int = 0
    events: int = 0
    saved_step: int | None = None
    saved_at: float | None = None


@dataclass
class FakeJob:
    """Trains `total_steps` steps of `step_s` seconds, saves every `save_every` of them.

    Goes on from its last save in the next attempt, saves and stops when `stop.json`, the budget or
    the deadline tell it to, and meets the fate that `fates` holds for an attempt's number.
    """

    store: ObjectStore
    """The run's own."""
    total_steps: int = 20
    step_s: float = 1.0
    boot_s: float = 2.0
    save_every: int = 5
    save_s: float = 0.0
    """Seconds that the last save before leaving takes."""
    fates: Mapping[int, JobFate] = field(default_factory=dict)
    trained: list[tuple[int, int]] = field(default_factory=list, init=False)
    """(attempt, step) of every step finished, in order."""
    saves: list[tuple[int, int]] = field(default_factory=list, init=False)
    """(attempt, step) of every save, in order."""
    _plays: dict[str, _Play] = field(default_factory=dict, init=False)

    def play(self, cluster: FakeCluster, now: float) -> None:
        """Let the job on `cluster` live until `now`."""
        first = _Play(
            attempt=cluster.request.attempt,
            nodes=tuple(range(cluster.request.nodes)),
            begun_at=cluster.started_at,
            at=cluster.started_at + self.boot_s,
        )
        self._plays.setdefault(cluster.name, first)
        while True:
            play = self._plays[cluster.name]
            if play.at > now or play.over:
                break
            if not play.started and not self._turn_has_come(cluster):
                self._wait_for_turn(cluster, play)
            elif not play.started:
                self._start(cluster, play)
            elif not self._meets_fate(cluster, play) and not self._hears_stop(cluster, play):
                self._live(cluster, play)

    # ------------------------------------------------------------ parts

    def _turn_has_come(self, cluster: FakeCluster) -> bool:
        """Tell whether the attempt that this one waits for has ended, as a real job does."""
        after = cluster.request.env.get(env.AFTER)
        if after is None or self.store.head(keys.go(cluster.request.attempt)) is not None:
            return True
        events = [
            Event.from_json(self.store.get(info.key))
            for info in self.store.list(keys.events(int(after)))
        ]
        ends = [event.data["reason"] for event in events if event.kind == JobEvent.ENDED.value]
        return any(EndReason(reason).retried for reason in ends)

    def _wait_for_turn(self, cluster: FakeCluster, play: _Play) -> None:
        play.at += 1.0
        if self.store.head(keys.stop(play.attempt)) is not None:
            self._end(cluster, play, EndReason.STOPPED, exit_code=75)

    def _start(self, cluster: FakeCluster, play: _Play) -> None:
        play.started = True
        source = self.saves[-1] if self.saves else None
        play.step = play.first_step = source[1] if source else 0
        self._write(
            cluster,
            play,
            JobEvent.STARTED,
            world_size=len(play.nodes),
            nodes=len(play.nodes),
            resumed_from=keys.checkpoint(source[1], source[0]) if source else None,
            resumed_step=play.step,
            total_steps=self.total_steps,
        )
        self._beat(cluster, play)
        play.at += self.step_s

    def _live(self, cluster: FakeCluster, play: _Play) -> None:
        if not play.hung:
            play.step += 1
            self.trained.append((play.attempt, play.step))
        self._beat(cluster, play)
        if play.step >= self._until(cluster) and not play.hung:
            self._leave(cluster, play, EndReason.PHASE_DONE)
        elif play.step >= self.total_steps:
            self._save(cluster, play, "final")
            self._end(cluster, play, EndReason.FINISHED, exit_code=0)
        elif play.step % self.save_every == 0 and not play.hung:
            self._save(cluster, play, "periodic")
        play.at += self.step_s

    def _until(self, cluster: FakeCluster) -> float:
        until = int(cluster.request.env.get(env.UNTIL_STEP, self.total_steps))
        return math.inf if until >= self.total_steps else until

    def _meets_fate(self, cluster: FakeCluster, play: _Play) -> bool:
        fate = self.fates.get(play.attempt)
        if play.announced_until is not None and play.at >= play.announced_until:
            return self._comes_true(cluster, play)
        if fate is None or play.met_fate or play.at < play.begun_at + fate.at_s:
            return False
        play.met_fate = True
        if fate.how in ("notice", "term"):
            self._warned(cluster, play, fate)
        elif fate.how in ("grace", "withdraw", "deaf", "vanish"):
            play.announced_until = play.at + fate.for_s
            self._announce(cluster, play, play.announced_until)
        elif fate.how == "fail":
            self._end(cluster, play, EndReason.FAILED, exit_code=1, traceback="ValueError: no")
        elif fate.how == "exit":
            play.over = True
            cluster.end_all(play.at, NodeEnd.EXITED, exit_code=fate.exit_code)
        elif fate.how.startswith("lose"):
            self._lose(cluster, play, fate)
        elif fate.how == "silence":
            play.silent_until = play.at + fate.for_s
        elif fate.how == "stuck":
            play.hung = True
        else:
            raise ValueError(f"no such fate: {fate.how!r}")
        return play.over

    def _announce(self, cluster: FakeCluster, play: _Play, until: float) -> None:
        self._write(
            cluster, play, JobEvent.NOTICE, source="aws", action="stop", deadline_at=to_iso(until)
        )

    def _comes_true(self, cluster: FakeCluster, play: _Play) -> bool:
        """Carry out what was announced, or take it back; return whether the job has left."""
        play.announced_until = None
        match self.fates[play.attempt].how:
            case "withdraw":
                self._write(cluster, play, JobEvent.WITHDRAWN, source="aws")
            case "vanish":
                play.over = True
                cluster.end_all(play.at, NodeEnd.LOST, detail="killed without notice")
            case "grace":
                self._leave(cluster, play, EndReason.PREEMPTED)
        return play.over

    def _warned(self, cluster: FakeCluster, play: _Play, fate: JobFate) -> None:
        cloud = fate.how == "notice"
        deadline_at = to_iso(play.at + 120.0) if cloud else None
        source = "aws" if cloud else "sigterm"
        self._write(
            cluster, play, JobEvent.NOTICE, source=source, action="stop", deadline_at=deadline_at
        )
        self._leave(cluster, play, EndReason.PREEMPTED if cloud else EndReason.TERMINATED)

    def _lose(self, cluster: FakeCluster, play: _Play, fate: JobFate) -> None:
        for node in range(min(fate.nodes, cluster.request.nodes)):
            cluster.end(node, play.at, NodeEnd.LOST, detail="killed without notice")
        play.over = True
        if fate.how == "lose_and_tell":
            self._leave(cluster, play, EndReason.NODE_LOST)

    def _hears_stop(self, cluster: FakeCluster, play: _Play) -> bool:
        if play.hung:
            return False
        for variable, reason in (
            (env.BUDGET_STOP_AT, EndReason.BUDGET),
            (env.DEADLINE_STOP_AT, EndReason.DEADLINE),
        ):
            stop_at = cluster.request.env.get(variable)
            if stop_at is not None and play.at >= float(stop_at):
                self._leave(cluster, play, reason)
                return True
        if self.store.head(keys.stop(play.attempt)) is None:
            return False
        body = json.loads(self.store.get(keys.stop(play.attempt)))
        self._leave(cluster, play, EndReason(body["exact_reason"]))
        return True

    def _leave(self, cluster: FakeCluster, play: _Play, reason: EndReason) -> None:
        play.at += self.save_s
        self._save(cluster, play, "emergency")
        self._end(cluster, play, reason, exit_code=1)

    def _save(self, cluster: FakeCluster, play: _Play, kind: str) -> None:
        self.saves.append((play.attempt, play.step))
        play.saved_step, play.saved_at = play.step, play.at
        self._write(
            cluster,
            play,
            JobEvent.SAVED,
            step=play.step,
            checkpoint=keys.checkpoint(play.step, play.attempt),
            checkpoint_kind=kind,
            size_bytes=1000,
            duration_s=self.save_s,
            train_s=self._train_s(play),
        )

    def _end(
        self,
        cluster: FakeCluster,
        play: _Play,
        reason: EndReason,
        *,
        exit_code: int,
        traceback: str | None = None,
    ) -> None:
        self._write(
            cluster,
            play,
            JobEvent.ENDED,
            reason=reason.value,
            step=play.step,
            saved_step=play.saved_step,
            train_s=self._train_s(play),
            message="",
            traceback=traceback,
        )
        play.over = True
        fate = self.fates.get(play.attempt)
        if fate is None or not play.met_fate or fate.regroup_s is None:
            cluster.end_all(play.at, NodeEnd.EXITED, exit_code=exit_code)
            return
        for node in play.nodes[: fate.nodes]:
            cluster.end(node, play.at, NodeEnd.EXITED, exit_code=exit_code)
        self._regroup(cluster, play, play.nodes[fate.nodes :], play.at + fate.regroup_s)

    def _regroup(
        self, cluster: FakeCluster, play: _Play, nodes: tuple[int, ...], at: float
    ) -> None:
        """Let the nodes that stay begin the next attempt."""
        group = Group(attempt=play.attempt + 1, nodes=nodes, host="here", port=1, at=at)
        self.store.put(keys.group(group.attempt), group.to_json(), if_absent=True)
        self._plays[cluster.name] = _Play(
            attempt=group.attempt, nodes=nodes, begun_at=at, at=at + self.boot_s
        )

    def _train_s(self, play: _Play) -> float:
        return (play.step - play.first_step) * self.step_s

    def _write(self, cluster: FakeCluster, play: _Play, kind: JobEvent, **data: Any) -> None:
        play.events += 1
        number = play.attempt
        event = Event(kind=kind.value, at=play.at, attempt=number, data=data)
        key = keys.event(number, at=play.at, node=0, rank=0, count=play.events)
        self.store.put(key, event.to_json(), if_absent=True)

    def _beat(self, cluster: FakeCluster, play: _Play) -> None:
        if play.at < play.silent_until:
            return
        number = play.attempt
        beat = Heartbeat(
            at=play.at,
            attempt=number,
            node=0,
            step=play.step,
            total_steps=self.total_steps,
            epoch=0,
            train_s=self._train_s(play),
            step_s=self.step_s,
            loss=1.0,
            saved_step=play.saved_step,
            saved_at=play.saved_at,
        )
        self.store.put(keys.heartbeat(number, 0), beat.to_json())
