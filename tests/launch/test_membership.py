from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.events import keys
from spotguard.events.event import Event, JobEvent
from spotguard.events.regrouping import Group, Joining
from spotguard.events.untrusted import Refused
from spotguard.launch.membership import Part, next_part, read_group
from spotguard.testing import FakeClock, FaultyStore, MemoryStore

if TYPE_CHECKING:
    from spotguard.storage.base import ObjectStore


class Patient(FakeClock):
    """A fake clock that lets other threads run while one sleeps."""

    def sleep(self, seconds: float) -> None:
        """Advance, after a moment of the real clock."""
        threading.Event().wait(0.001)
        super().sleep(seconds / 10)


def part(node: int, nodes: int | tuple[int, ...] = 3, attempt: int = 1) -> Part:
    """Return a node's part in an attempt."""
    members = tuple(range(nodes)) if isinstance(nodes, int) else nodes
    return Part(attempt=attempt, node=node, nodes=members, host="127.0.0.1", port=1)


def said(
    store: ObjectStore, *reasons: str, attempt: int = 1, saved: int | None = 20, clock: FakeClock
) -> None:
    """Let the job report its end."""
    for count, reason in enumerate(reasons):
        data = {"reason": reason, "saved_step": saved, "resumed_step": 10}
        event = Event(kind=JobEvent.ENDED.value, at=clock.now(), attempt=attempt, data=data)
        key = keys.event(attempt, at=event.at, node=0, rank=count, count=1)
        store.put(key, event.to_json())


def agree(
    store: ObjectStore,
    *parts: Part,
    leaving: tuple[int, ...] = (),
    nodes_min: int = 1,
    clock: FakeClock | None = None,
) -> dict[int, Any]:
    """Let nodes agree, each in a thread; return what each has, or the exception."""
    results: dict[int, Any] = {}
    clock = clock or Patient()

    def run(mine: Part) -> None:
        try:
            results[mine.node] = next_part(
                store, mine, leaves=mine.node in leaving, nodes_min=nodes_min, clock=clock
            )
        except Exception as problem:  # noqa: BLE001 - it is the result
            results[mine.node] = problem

    threads = [threading.Thread(target=run, args=[mine]) for mine in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


@pytest.fixture
def clock() -> Patient:
    """A clock that moves when a node waits."""
    return Patient()


@pytest.mark.parametrize("leaves", [0, 1, 2])
def test_those_that_stay_meet_at_the_first_of_them(clock: Patient, leaves: int) -> None:
    """All have the same group, without the leaving one, whoever that is: the first, too."""
    store = MemoryStore()
    said(store, "preempted", clock=clock)
    found = agree(store, *map(part, range(3)), leaving=(leaves,), clock=clock)

    staying = tuple(node for node in range(3) if node != leaves)
    assert found.pop(leaves) is None
    assert {mine.nodes for mine in found.values()} == {staying}
    assert {mine.attempt for mine in found.values()} == {2}
    assert len({(mine.host, mine.port) for mine in found.values()}) == 1
    assert read_group(store, 2) is not None


def test_nobody_waits_when_all_have_spoken(clock: Patient) -> None:
    """A node that says that it leaves need not be waited for; one that is dead costs seconds."""
    quick, slow = MemoryStore(), MemoryStore()
    said(quick, "preempted", clock=clock)
    agree(quick, *map(part, range(3)), leaving=(1,), clock=clock)
    assert sum(clock.slept) < 4
    said(slow, "node_lost", clock=clock)
    found = agree(slow, part(0), part(2), clock=clock)
    assert [mine.nodes for mine in found.values()] == [(0, 2), (0, 2)]
    assert sum(clock.slept) >= 4


@pytest.mark.parametrize(
    "reasons",
    [
        ("finished",),
        ("failed",),
        ("stopped",),
        ("budget",),
        ("deadline",),
        ("resized",),
        ("store_failed",),
        ("fenced",),
        ("node_lost", "failed"),
        ("nonsense",),
        (),
    ],
)
def test_only_a_lack_of_nodes_is_gone_on_from(clock: Patient, reasons: tuple[str, ...]) -> None:
    """What the script did wrong, the user wanted or nobody explained is not tried again here."""
    store = MemoryStore()
    said(store, *reasons, clock=clock)
    assert agree(store, part(0), part(1), clock=clock) == {0: None, 1: None}
    assert not list(store.list(keys.attempt(2)))


@pytest.mark.parametrize("saved", [None, 10])
def test_an_attempt_that_got_nowhere_is_left_to_the_controller(
    clock: Patient, saved: int | None
) -> None:
    """A loop of nodes that die at once would cost money for ever."""
    store = MemoryStore()
    said(store, "node_lost", saved=saved, clock=clock)
    assert agree(store, part(0), part(1), clock=clock) == {0: None, 1: None}


def test_too_few_nodes_give_up(clock: Patient) -> None:
    """Fewer than the run may have: a new cluster is asked for instead."""
    store = MemoryStore()
    said(store, "preempted", clock=clock)
    assert agree(store, *map(part, range(3)), leaving=(0,), nodes_min=3, clock=clock) == {
        0: None,
        1: None,
        2: None,
    }
    assert read_group(store, 2) is None


def test_nobody_waits_for_what_cannot_be(clock: Patient) -> None:
    """All nodes are needed and one leaves: at once, a new cluster. A dead one may have been a
    process only, so that is waited for; if all are there, they go on, as many as they were."""
    store = MemoryStore()
    said(store, "preempted", clock=clock)
    agree(store, part(0), part(1), nodes_min=3, clock=clock)
    assert not list(store.list(keys.attempt(2)))
    assert clock.slept == []

    said(store, "node_lost", clock=clock)
    found = agree(store, *map(part, range(3)), nodes_min=3, clock=clock)
    assert {mine.nodes for mine in found.values()} == {(0, 1, 2)}


def test_who_comes_late_has_no_part(clock: Patient) -> None:
    """The group is made once; a node that is not in it must not begin anything."""
    store = MemoryStore()
    said(store, "node_lost", clock=clock)
    first = agree(store, part(1), part(2), clock=clock)
    assert first[1].nodes == (1, 2)
    assert agree(store, part(0), clock=clock) == {0: None}
    group = read_group(store, 2)
    assert group is not None
    assert group.nodes == (1, 2)


def test_two_first_nodes_make_one_group(clock: Patient) -> None:
    """Each thinks that it is the first, for it sees no other's word: the store decides."""
    inner = MemoryStore()
    said(inner, "node_lost", clock=clock)
    both = threading.Barrier(2)

    def meet() -> None:
        both.wait(10)

    stores = [FaultyStore(inner) for _ in range(2)]
    for store in stores:
        store.before("put", lambda _: meet(), key_contains="group.json")
    results: list[Any] = []

    def alone(index: int) -> None:
        class Blind:
            def list(self, prefix: str = "", **more: Any) -> Any:
                found = stores[index].list(prefix, **more)
                mine = keys.joining_node(2, index)
                return (x for x in found if "joining" not in x.key or x.key == mine)

            def __getattr__(self, name: str) -> Any:
                return getattr(stores[index], name)

        results.append(next_part(Blind(), part(index, 2), leaves=False, nodes_min=1, clock=clock))

    threads = [threading.Thread(target=alone, args=[index]) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(results) == 2
    assert sum(mine is not None for mine in results) == 1, "one began, the other has no part"


def test_attempts_in_place_follow_each_other(clock: Patient) -> None:
    """The indices are the cluster's own for ever: 4 nodes, then 1, 2, 3, then 1 and 3."""
    store = MemoryStore()
    said(store, "preempted", clock=clock)
    second = agree(store, *(part(n, 4) for n in range(4)), leaving=(0,), clock=clock)
    said(store, "preempted", attempt=2, clock=clock)
    parts = [mine for mine in second.values() if mine is not None]
    third = agree(store, *parts, leaving=(2,), clock=clock)
    assert third[1].nodes == third[3].nodes == (1, 3)
    assert third[1].attempt == 3
    assert third[2] is None


@pytest.mark.parametrize(
    "raw",
    [b"", b"{}", b"[]", b"null", b'{"schema": 2}', b'{"schema": 1, "nodes": 3}', b"\xff"],
)
def test_a_damaged_group_is_none(raw: bytes) -> None:
    """An error of ours, never a crash; and a word that cannot be read was not said."""
    store = MemoryStore()
    store.put(keys.group(2), raw)
    assert read_group(store, 2) is None
    for kind in (Group, Joining):
        with pytest.raises(Refused, match=r"not |makes no sense|has no"):
            kind.from_json(raw)
