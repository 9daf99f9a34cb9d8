"""What the keeper has of the place at which a script left its loop, and what it saves of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from spotguard.checkpoint.lineage import claim_attempt
from spotguard.events.event import JobEvent
from spotguard.events.states import CheckpointKind, EndReason
from spotguard.runtime.checkpoint import left_loop
from spotguard.runtime.checkpoint.captured import Between
from spotguard.runtime.checkpoint.training_state import Keeper
from spotguard.runtime.checks.dataset_state import DatasetSettings
from spotguard.runtime.distributed.rendezvous import Alone
from spotguard.runtime.ending.leaving import Leaving
from spotguard.runtime.preemption.stop_consensus import StopRequest
from spotguard.runtime.process.settings import Settings
from spotguard.runtime.reporting.metrics import Metrics
from spotguard.runtime.state.changed_setup import SetUp
from spotguard.testing import FakeRendezvous, MemoryStore
from tests.runtime.harness.lab import Rank, adapters, next_attempt, together

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.runtime.data.loader import Loader
    from spotguard.runtime.distributed.rendezvous import Coordinator
    from spotguard.runtime.ending.end_writer import EndWriter
    from spotguard.runtime.preemption.exit_hooks import ExitWatch
    from spotguard.runtime.preemption.stop_sources import Listener
    from spotguard.runtime.reporting.node_reports import Reporter
    from spotguard.runtime.step import Step
    from spotguard.storage.base import ObjectStore

TOLD = StopRequest(reason=EndReason.PREEMPTED, message="a notice", solo=True)


class Script:
    """One rank of a script with a model of one weight, and its keeper; `told` is its history."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        rank: int = 0,
        world_size: int = 1,
        coordinator: Coordinator | None = None,
        keeps_copies: bool = False,
    ) -> None:
        self.model = torch.nn.Linear(1, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.told: list[JobEvent] = []
        self.keeper = Keeper(
            Settings(
                run_id="a-run",
                attempt=1,
                store_url="memory",
                rank=rank,
                world_size=world_size,
                local_rank=rank,
                node=0,
                launched=False,
            ),
            store=store,
            run_id="a-run",
            attempt=1,
            coordinator=coordinator or Alone(),
            local_copy=None,
            reporter=cast("Reporter", SimpleNamespace(event=lambda kind, **_: self._note(kind))),
            metrics=Metrics(store, attempt=1, node=0, local_rank=rank, rank=rank),
            save_random=False,
            on_fenced=lambda _: None,
        )
        self._begin(keeps_copies)

    def _note(self, kind: JobEvent) -> None:
        self.told.append(kind)

    def _begin(self, keeps_copies: bool) -> None:
        keeper = self.keeper
        keeper.objects.update(adapters({"model": self.model, "optimizer": self.optimizer}))
        keeper.set_up = SetUp(keeper.objects)
        loader = SimpleNamespace(
            keep=lambda _: None,
            identity=dict,
            remembered=None,
            shared=None,
            own=None,
            has_own_state=False,
            settings=DatasetSettings(),
        )
        restored = SimpleNamespace(manifest=None, prefix=None, bases=())
        keeper.restored(cast("Any", restored), cast("Loader", loader))
        keeper.begin(0, 10)
        if keeps_copies:
            keeper.keep_copies()
        keeper.watch_weights()

    def change(self, weight: float) -> None:
        """Put another weight in place, as an evaluation of an average does."""
        with torch.no_grad():
            self.model.weight.fill_(weight)

    def train(self, step: int, weight: float, *, to_its_end: bool = True) -> None:
        """Do a step, which has changed the weight so."""
        done = cast("Step", SimpleNamespace(epoch=0, done=1, own_loss=None))
        self.keeper.current = done
        self.keeper.begin_to_change()
        self.change(weight)
        if to_its_end:
            self.keeper.finished_step(step, 1.0, done)
            self.keeper.saver.wait()


def saved(store: MemoryStore) -> tuple[int, float]:
    """Return the step of the newest checkpoint, and the weight in it."""
    model = torch.nn.Linear(1, 1, bias=False)
    found = next_attempt(store, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    return (found.manifest.step if found.manifest else 0), float(model.weight.detach())


def claimed() -> MemoryStore:
    """Return the store of a run whose first attempt has begun."""
    store = MemoryStore()
    claim_attempt(store, 1, None)
    return store


@pytest.mark.parametrize("by_error", [True, False])
@pytest.mark.parametrize("keeps_copies", [True, False])
def test_a_loop_left_at_an_epochs_end_is_over_only_if_it_was_no_error(
    *, by_error: bool, keeps_copies: bool
) -> None:
    """After an error, such as that of a lost rank, the end comes again, with the rate before it.

    Left on purpose, what the end has done so far counts, and nothing that came after the loop.
    """
    store = claimed()
    script = Script(store, keeps_copies=keeps_copies)
    script.train(1, 7.0)
    script.keeper.at = Between(epoch_end=True)
    [group] = script.optimizer.param_groups
    group["lr"] = 0.5  # a schedule's step
    script.keeper.loop_left(copies=True, between=Between())
    if by_error:
        script.keeper.save_boundary(TOLD)
    else:
        script.change(99.0)  # what it loads for its test
        group["lr"] = 0.1
        script.keeper.left_early()
        script.keeper.save_final(halfway=True)

    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = next_attempt(store, model=model, optimizer=optimizer)
    assert found.manifest is not None
    assert found.manifest.counters["epoch_end"] is by_error
    assert optimizer.param_groups[0]["lr"] == (1.0 if by_error else 0.5)
    assert (found.manifest.step, float(model.weight.detach())) == (1, 7.0)


def test_other_weights_that_are_in_place_where_the_loop_is_left_are_not_kept() -> None:
    """Averaged ones, or the best: with the last step's moments they would be taken up again."""
    store = claimed()
    script = Script(store)
    script.train(1, 7.0)
    script.keeper.save_in_background()
    script.keeper.saver.wait()
    script.train(2, 8.0)
    script.change(100.0)
    script.keeper.loop_left(copies=True)
    script.keeper.left_early()

    assert script.keeper.save_boundary(TOLD) is None
    assert script.told[-1] is JobEvent.SAVE_FAILED
    assert saved(store) == (1, 7.0)


def test_weights_that_were_put_back_after_the_loop_are_saved() -> None:
    """What puts averaged weights in place for a while may do so around the loop's last lines."""
    store = claimed()
    script = Script(store)
    script.train(1, 7.0)
    script.change(100.0)
    script.keeper.loop_left(copies=True)
    script.keeper.left_early()
    script.change(7.0)

    assert script.keeper.save_boundary(TOLD) is None
    assert saved(store) == (1, 7.0)


@pytest.mark.parametrize("copies", [True, False], ids=["copied", "not copied"])
def test_a_copy_of_each_boundary_is_none_of_what_comes_after_the_loop(copies: bool) -> None:
    """A script of phases has one of each step: it was taken when the script ended, or was told."""
    store = claimed()
    script = Script(store, keeps_copies=True)
    script.train(1, 7.0)
    script.keeper.save_in_background()
    script.keeper.saver.wait()
    script.train(2, 8.0, to_its_end=False)
    script.keeper.loop_left(copies=copies)
    script.change(100.0)
    script.keeper.left_early()

    assert script.keeper.save_boundary(TOLD) is None
    assert saved(store) == ((2, 8.0) if copies else (1, 7.0))


def left_by_two(store: MemoryStore, words: FakeRendezvous) -> list[Script]:
    """Return two ranks that have left their loops in step 2, and what they did then."""
    ranks = [Script(store, rank=r, world_size=2, coordinator=words.rank(r)) for r in range(2)]
    together(*(lambda rank=rank: rank.train(1, 7.0) for rank in ranks))  # which compare theirs
    for rank in ranks:
        rank.train(2, 8.0, to_its_end=False)
        rank.keeper.loop_left(copies=True)
        rank.change(100.0)
        rank.keeper.left_early()
    return ranks


def test_the_rank_that_holds_the_weights_of_a_break_is_elected() -> None:
    """The other one has nothing to save, which is no failure: its word comes first or last."""
    store = claimed()
    first, second = left_by_two(store, FakeRendezvous())

    assert [first.keeper.may_be_elected, second.keeper.may_be_elected] == [True, False]
    assert second.keeper.save_boundary(TOLD) is None
    assert JobEvent.SAVE_FAILED not in second.told
    assert first.keeper.save_boundary(TOLD) is None
    assert saved(store) == (2, 8.0)


def test_a_rank_without_a_copy_commits_no_weights_of_its_own() -> None:
    """A few weights are looked at, and others may have changed since the loop was left."""
    store = claimed()
    _, second = left_by_two(store, FakeRendezvous())
    second.change(8.0)

    assert second.keeper.save_boundary(TOLD) is None
    assert saved(store)[0] == 0


def two_that_may_not_copy(monkeypatch: pytest.MonkeyPatch, without: set[int]) -> list[Script]:
    """Return two ranks after a break; those `without` a copy could make none."""
    words = FakeRendezvous()
    store = claimed()
    ranks = [Script(store, rank=r, world_size=2, coordinator=words.rank(r)) for r in range(2)]
    for index, rank in enumerate(ranks):
        rank.train(1, 8.0, to_its_end=False)
        if index in without:
            monkeypatch.setattr(rank.keeper.saver, "hold", lambda *_: None)
        rank.keeper.loop_left(copies=True)
        rank.keeper.left_early()
    return ranks


def test_a_rank_that_has_the_weights_no_more_fails_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the first rank loads the best weights: the run is finished, not saved, on all ranks."""
    first, second = two_that_may_not_copy(monkeypatch, {0, 1})
    first.change(100.0)
    ends = [lambda rank=rank: rank.keeper.save_final(halfway=True) for rank in (first, second)]

    assert together(*ends) == [None, None]
    assert [first.keeper.is_saved, second.keeper.is_saved] == [False, False]
    assert [first.told.count(JobEvent.SAVE_FAILED), len(second.told)] == [1, 0]


def test_a_rank_that_stores_nothing_refuses_no_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first rank holds is whole, whatever has become of the weights of another."""
    first, second = two_that_may_not_copy(monkeypatch, {1})
    second.change(100.0)
    ends = [lambda rank=rank: rank.keeper.save_final(halfway=True) for rank in (first, second)]

    assert together(*ends) == [None, None]
    assert [first.keeper.is_saved, second.keeper.is_saved] == [True, True]


def leaving_of(script: Script, previous_hook: Callable[..., object]) -> Leaving:
    """Return what ends a script, as far as these tests go."""
    leaving = Leaving(
        coordinator=Alone(),
        keeper=script.keeper,
        reporter=cast("Reporter", None),
        end=cast("EndWriter", SimpleNamespace(begun=True)),
        peer_timeout_s=None,
    )
    hook = SimpleNamespace(previous_hook=previous_hook, called=False, error=None)
    leaving.listen_to(cast("Listener", None), cast("ExitWatch", hook))
    return leaving


@pytest.mark.parametrize("error", [ValueError("a mistake"), None], ids=["error", "break"])
def test_a_notice_while_an_error_is_shown_takes_it_for_no_break(error: Exception | None) -> None:
    """In the hook for exceptions nothing handles it, and its step may be half done."""
    script = Script(claimed())
    script.train(1, 7.0)
    script.train(2, 8.0, to_its_end=False)
    script.keeper.loop_left(copies=True)
    told = replace(TOLD, solo=False, deadline_at=1.0)
    leaving = leaving_of(script, lambda *_: leaving._give_up_step(told))

    if error is not None:
        leaving.by_exception(type(error), error, None)
    else:
        leaving._give_up_step(told)
    assert script.keeper.finished == (1 if error else 2)


def test_an_error_whose_hook_is_broken_off_ends_the_run_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a second Ctrl-C, or by a mistake in a hook of the script's own."""
    seen: list[BaseException] = []

    def broken_off(*_: object) -> None:
        raise KeyboardInterrupt

    leaving = leaving_of(Script(claimed()), broken_off)
    monkeypatch.setattr(leaving, "_by_error", seen.append)
    error = ValueError("a mistake")
    with pytest.raises(KeyboardInterrupt):
        leaving.by_exception(ValueError, error, None)
    assert seen == [error]


def test_who_lost_a_rank_relies_on_no_copy_of_the_first_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collective fails before the ring tells, and it may be the first rank that is gone."""
    script = Script(claimed())
    leaving = leaving_of(script, lambda *_: None)
    relied: list[bool] = []
    monkeypatch.setattr(leaving, "_end", SimpleNamespace(begun=False))
    monkeypatch.setattr(leaving, "_watch", SimpleNamespace(agreed=None), raising=False)
    monkeypatch.setattr(leaving, "_is_loss_of_peer", lambda _: True)
    monkeypatch.setattr(leaving, "_tell_peer_lost", lambda _: None)
    alone = script.keeper.saver.alone
    monkeypatch.setattr(leaving, "_take", lambda *_: relied.append(not alone.is_set()))
    leaving.by_exception(RuntimeError, RuntimeError("Connection closed by peer"), None)
    assert relied == [False]


@pytest.mark.parametrize("stuck", [0, 1, None])
def test_no_copy_is_queued_behind_a_gpu_that_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch, stuck: int | None
) -> None:
    """Whichever of a process's GPUs it is: one that waits for a rank that is gone is never done."""

    def stream(gpu: int) -> Any:
        done = SimpleNamespace(query=lambda: gpu != stuck)
        return SimpleNamespace(record_event=lambda: done)

    monkeypatch.setattr(left_loop, "gpus_in_use", lambda: [0, 1])
    monkeypatch.setattr(left_loop, "PATIENCE_S", 0.0)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    saver, objects = Rank().saver, adapters({"model": torch.nn.Linear(1, 1)})
    held = left_loop.copied(saver, lambda: saver.capture(1, CheckpointKind.EMERGENCY, objects, {}))

    assert (held is None) == (stuck is not None)
