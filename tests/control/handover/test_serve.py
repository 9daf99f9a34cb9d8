from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from spotguard.control.handover import stored_wishes
from spotguard.control.handover.adopt import ADOPTED_WORDS
from spotguard.control.handover.serve import Service
from spotguard.control.journal.record import Kind
from spotguard.control.journal.stored.controller_nodes import GONE_WITHIN_S, read_nodes
from spotguard.control.supervisor.lease import read_holder
from spotguard.errors import EnvironmentFailure, SpecError, UsageError
from spotguard.storage.urls import folder_at
from tests.control.handover.two_homes import RUN, Homes

if TYPE_CHECKING:
    from pathlib import Path

REST_S = 300.0


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Homes:
    """A machine of the user's own that has the run, and a laptop that has it no more."""
    made = Homes(tmp_path, monkeypatch)
    with made.at("node"):
        made.service = Service(
            made.place, made.steering, price_usd_per_h=0.5, clock=made.clock, rest_s=REST_S
        )
    assert made.serves()
    assert made.serves()
    made.clock.on_sleep = made.serves
    return made


def test_a_machine_of_the_users_own_is_charged_at_the_price_that_it_was_given(
    homes: Homes,
) -> None:
    """One node in the books, however often it begins anew."""
    with homes.at("node"):
        homes.service = Service(homes.place, homes.steering, price_usd_per_h=0.5, clock=homes.clock)
    assert homes.serves()
    [stored] = read_nodes(homes.store)
    assert (stored.node.cluster, stored.node.price_usd_per_h) == ("", 0.5)


def test_wishes_are_heard_through_the_store_alone(homes: Homes) -> None:
    """Each is done once, in their order, and leaves nothing behind."""
    stored_wishes.ask(
        homes.store, stored_wishes.RESUME, homes.clock, {"budget_usd": 7, "nodes": "2:3"}
    )
    stored_wishes.ask(homes.store, stored_wishes.STOP, homes.clock)
    stored_wishes.ask(homes.store, stored_wishes.DOWN, homes.clock)
    homes.serves()
    assert homes.steering.asked == ["resume 7.0 2:3", "stop", "down"]
    assert stored_wishes.unanswered(homes.store) == []
    assert list(homes.store.list("wishes/")) == []


def test_what_cannot_be_done_is_answered(homes: Homes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence is the one that the command would have said there."""

    def refuse(*_: object, **__: object) -> None:
        raise SpecError("nodes", "given '0'; no number of nodes")

    monkeypatch.setattr(homes.steering, "resume", refuse)
    with pytest.raises(UsageError, match="no number of nodes"):
        stored_wishes.ask(homes.store, stored_wishes.RESUME, homes.clock, {"nodes": "0"})
    assert list(homes.store.list("wishes/")) == []


def test_a_wish_that_nobody_hears_is_taken_back(homes: Homes) -> None:
    """Else it would be done a day later, when nobody wants it any more."""
    homes.clock.on_sleep = lambda: None
    with pytest.raises(EnvironmentFailure, match="did not hear of it"):
        stored_wishes.ask(homes.store, stored_wishes.STOP, homes.clock)
    assert homes.serves()
    assert homes.steering.asked == []


@pytest.mark.parametrize("kind", [stored_wishes.STOP, stored_wishes.LEAVE])
def test_a_wish_that_is_broken_off_is_taken_back(homes: Homes, kind: str) -> None:
    """Ctrl-C while it waits: should the node let go later, nobody would adopt the run."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    homes.clock.on_sleep = interrupt
    with pytest.raises(KeyboardInterrupt):
        stored_wishes.ask(homes.store, kind, homes.clock)
    assert list(homes.store.list("wishes/")) == []


@pytest.mark.parametrize(
    "age_s", [stored_wishes.OUTDATED_S - 60.0, stored_wishes.OUTDATED_S + 60.0]
)
def test_a_wish_whose_asker_died_is_not_carried_out_much_later(homes: Homes, age_s: float) -> None:
    """How old it is the store says, whatever the machines' own clocks do."""
    key = "wishes/0000000000000-x.json"
    homes.store.put(key, b'{"kind":"stop"}')
    path = folder_at(homes.store.url)
    assert path is not None
    at = time.time() - age_s
    os.utime(f"{path}/{key}", (at, at))
    homes.clock.jump_wall(1e6)
    homes.serves()
    assert homes.steering.asked == (["stop"] if age_s < stored_wishes.OUTDATED_S else [])
    assert list(homes.store.list("wishes/")) == []


def test_a_run_is_kept_if_nobody_waits_for_it_any_more(
    homes: Homes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asked for it gave up while the controller here was being ended."""
    leave = stored_wishes.AskedThere(key="wishes/0000000000000-x.json", kind=stored_wishes.LEAVE)
    monkeypatch.setattr(stored_wishes, "unanswered", lambda _: [leave])
    assert homes.serves(), "it goes on serving"
    monkeypatch.undo()
    assert homes.serves()
    assert homes.controls("node")
    [stored] = read_nodes(homes.store)
    assert stored.node.until is None
    holder = read_holder(homes.store)
    assert holder is not None
    assert not holder[0].released


@pytest.mark.parametrize("body", [b"", b"[]", b'{"kind":"rm -rf"}', b'{"kind":"stop","data":3}'])
def test_a_wish_that_makes_no_sense_stands_in_nobodys_way(homes: Homes, body: bytes) -> None:
    """It is removed, and the next one is heard."""
    homes.store.put("wishes/0000000000000-x.json", body)
    stored_wishes.ask(homes.store, stored_wishes.STOP, homes.clock)
    assert homes.steering.asked == ["stop"]
    assert list(homes.store.list("wishes/")) == []


def test_at_rest_it_stays_a_while_and_then_says_until_when_it_costs(homes: Homes) -> None:
    """A wish in that time is heard; after it the bill of the run grows no more."""
    with homes.folder("node").journal() as journal:
        rest = {"state": "paused", "detail": "", "exit_code": 75}
        journal.append(Kind.SETTLED.value, at=homes.clock.now(), data=rest)
    assert homes.serves()
    homes.clock.advance(REST_S - 50.0)
    stored_wishes.ask(homes.store, stored_wishes.RESUME, homes.clock)
    homes.clock.advance(60.0)
    assert homes.serves(), "the user was heard a moment ago"
    homes.clock.advance(REST_S + 1.0)
    assert not homes.serves()
    [stored] = read_nodes(homes.store)
    assert stored.node.until is not None
    assert stored.node.until <= homes.clock.now() + GONE_WITHIN_S
    assert homes.record("node").controller_nodes == (stored.node,)
    assert homes.record("node").controller_node is None


def test_a_run_goes_on_once_the_earlier_nodes_of_an_adopted_one_are_gone(homes: Homes) -> None:
    """Not before it has come to rest, which may take more looks than one."""
    with homes.folder("node").journal() as journal:
        journal.append(Kind.RESUMED.value, at=homes.clock.now(), data={"limits": {}})
        rests = {"rests": ADOPTED_WORDS}
        journal.append(Kind.ADOPTED.value, at=homes.clock.now(), data=rests)
    (homes.folder("node").path / "going-on").touch()
    assert homes.serves()
    assert homes.serves()
    assert homes.steering.asked == []
    with homes.folder("node").journal() as journal:
        rest = {"state": "paused", "detail": ADOPTED_WORDS, "exit_code": 75}
        journal.append(Kind.SETTLED.value, at=homes.clock.now(), data=rest)
    assert homes.serves()
    assert homes.serves()
    assert homes.steering.asked == ["resume None None"]


def test_a_run_that_another_machine_took_is_left_to_it(homes: Homes) -> None:
    """The node goes: nobody pays for one that controls nothing."""
    with homes.folder("node").journal() as journal:
        journal.append(Kind.TAKEN_OVER.value, at=homes.clock.now(), data={"by": "a laptop"})
    assert not homes.serves()
    assert not homes.controls("laptop")


def test_where_there_is_no_run_nothing_is_served_and_nothing_written(tmp_path: Path) -> None:
    """A mistyped place is told at once; it is not waited for."""
    with pytest.raises(UsageError, match="There is no run at"):
        Service(f"{tmp_path}/store/{RUN}", None)  # type: ignore[arg-type]
    assert not (tmp_path / "store" / RUN).exists()
