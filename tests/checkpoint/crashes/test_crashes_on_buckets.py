"""Death, and the network's worst, at every request of whole saves to S3, Azure and Google.

The state is large enough to go up in parts. Saves of all kinds, claims and pruning are lived
through again and again, each time with another request being the last, or the one that fails.
"""

from __future__ import annotations

import contextlib
import threading
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pytest
import torch

from spotguard.checkpoint.lineage import latest_valid
from spotguard.checkpoint.manifest import check_shards_intact, commit
from spotguard.errors import AlreadyExists, SpotguardError
from spotguard.events import keys
from spotguard.testing import FakeClock
from spotguard.testing.stores import SimulatedCrash
from tests.checkpoint.crashes.savings import make_manifest
from tests.runtime.harness import deaths
from tests.storage.harness import fault_proxy as faults
from tests.storage.harness.lanes import be_impatient, silence_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.storage.base import ObjectStore
    from spotguard.storage.remote.bucket import Bucket
    from tests.storage.harness.fault_proxy import Fault
    from tests.storage.harness.lanes import Lane

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]
Result = TypeVar("Result")

CHANGES = {"put", "begin", "put_part", "finish", "abort", "copy", "delete"}
"""The requests that change a bucket: death between two others leaves the same behind."""
FAULTS: dict[str, Fault] = {
    "503": faults.refuse(503),
    "reset in the request": faults.reset_in_request(),
    "lost answer": faults.lose_answer(),
    "truncated answer of wrong length": faults.truncate(lying=True),
    "stall after it was done": faults.stall(after=True),
    "twice": faults.twice(),
    "damaged request": faults.damage_request(),
}


class DyingBucket:
    """A bucket whose user dies at its `n`-th change, before or after it took effect."""

    def __init__(self, inner: Bucket, n: int, *, after: bool) -> None:
        self._inner = inner
        self._left = n
        self._after = after
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._mortal(name, found) if callable(found) else found

    def _mortal(self, name: str, act: Callable[..., Result]) -> Callable[..., Result]:
        def call(*args: Any, **options: Any) -> Result:
            with self._lock:
                self._left -= name in CHANGES
                is_last = name in CHANGES and not self._left
                if self._left < 0 or (not self._left and not (is_last and self._after)):
                    raise SimulatedCrash("the process is dead")
            result = act(*args, **options)
            if is_last:
                raise SimulatedCrash("the process died")
            return result

        return call


@pytest.fixture(autouse=True)
def _large_state(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let each step's state make three parts; let who says nothing be given up soon."""

    def state(step: int) -> dict[str, Any]:
        weight = torch.full((550_000,), step, dtype=torch.uint8)
        weight[:: 1 << 12] = torch.arange(len(weight[:: 1 << 12])).to(torch.uint8)
        return {"weight": weight, "n": step}

    monkeypatch.setattr(deaths, "state", state)
    be_impatient(monkeypatch, silence_for(request.node.name))


@pytest.fixture
def begun(lane: Lane) -> Callable[[int], Lane]:
    """Return a function: a place of that number in which one attempt was lived, and no other."""
    deaths.begin(quick(place(lane, 0)))
    store = quick(lane)
    lived = [info.key.removeprefix("0/") for info in store.list("0/")]

    def another(number: int) -> Lane:
        for key in lived:
            store.copy(f"0/{key}", f"{number}/{key}")
        return place(lane, number)

    return another


def place(lane: Lane, number: int) -> Lane:
    """Return a place beside the others."""
    return type(lane)(lane.kind, f"{lane.url}/{number}", lane.proxy)


def quick(lane: Lane, bucket: Bucket | None = None) -> ObjectStore:
    """Return a store whose pauses between tries take no time."""
    return lane.store(bucket, clock=FakeClock())


def assert_nothing_is_left_over(lane: Lane, bucket: Bucket) -> None:
    """Check that what broken-off writes left is gone after the next start has cleaned up."""
    lane.store(bucket).clean_up(older_than_s=-60.0)
    assert list(bucket.uploads("")) == []


@pytest.mark.parametrize(
    ("lane", "after"),
    [("s3", True), ("azure", True), ("gcs", True), ("gcs", False)],
    indirect=["lane"],
)
def test_death_at_any_request_loses_nothing(begun: Callable[[int], Lane], after: bool) -> None:
    """The newest committed checkpoint comes back, and the run goes on.

    Before a request is after the one before it, but for parts that go up side by side; these are
    the same code for all vendors, so one of them shows it.
    """
    ends = set()
    for n in count(1):
        here = begun(n)
        bucket = here.bucket()  # to look by: making one takes as long as many requests
        inner = quick(here, bucket)
        told: list[int] = []
        dying = DyingBucket(here.bucket(), n, after=after)
        try:
            deaths.live(quick(here, cast("Bucket", dying)), tell=told.append)
        except SimulatedCrash:
            ends.add(deaths.check(inner, told))
            if n % 6 == 0:
                deaths.go_on(inner)
            assert_nothing_is_left_over(here, bucket)
            continue
        break

    assert ends == {30, *deaths.KINDS}
    assert n > 25, "the crashes hit nothing"


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_at_any_request_costs_no_checkpoint(
    lane: Lane, begun: Callable[[int], Lane], what: str
) -> None:
    """Every fifth request of a whole life fails, beginning with another one each time.

    All its saves succeed, and every committed checkpoint is whole.
    """
    for first in range(1, 6):
        here = begun(first)
        bucket = here.bucket()  # to look by: making one takes as long as many requests
        inner = quick(here, bucket)
        told: list[int] = []
        for nth in range(first, 300, 5):
            lane.proxy.on(FAULTS[what], nth=nth)
        struck = lane.proxy.struck
        deaths.live(quick(here), tell=told.append)
        lane.proxy.heal()

        assert lane.proxy.struck > struck + 5
        assert told == list(deaths.KINDS)
        assert deaths.check(inner, told) == 60
        assert_nothing_is_left_over(here, bucket)


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_that_stays_costs_no_committed_checkpoint(
    lane: Lane, begun: Callable[[int], Lane], what: str
) -> None:
    """From some request on everything fails: what was committed before comes back whole."""
    for nth in (1, 6, 12, 19, 27):
        here = begun(nth)
        bucket = here.bucket()  # to look by: making one takes as long as many requests
        inner = quick(here, bucket)
        told: list[int] = []
        lane.proxy.on(FAULTS[what], nth=nth, times=None)
        live_as_long_as_it_goes(here, told)
        lane.proxy.heal()
        deaths.check(inner, told)
        assert latest_valid(inner, verify=check_shards_intact)[1] == []
        assert_nothing_is_left_over(here, bucket)


def live_as_long_as_it_goes(lane: Lane, told: list[int]) -> None:
    """Live an attempt on a store that gives up soon."""
    with contextlib.suppress(SpotguardError):
        deaths.live(lane.store(clock=FakeClock(), patience_s=1.0), tell=told.append)


def test_of_two_commits_the_first_stays(lane: Lane) -> None:
    """A step that two writers commit is the first one's, also when its answer was lost."""
    store = quick(lane)
    first, second = (make_manifest(created_at=at) for at in (1.0, 2.0))
    lane.proxy.on(faults.lose_answer(), path="manifest")
    commit(store, first)
    with pytest.raises(AlreadyExists):
        commit(quick(lane), second)

    assert store.get(keys.manifest(first.prefix)) == first.to_json()
    assert lane.proxy.struck == 1
