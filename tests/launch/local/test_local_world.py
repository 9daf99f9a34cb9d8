from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.errors import NoCapacity
from spotguard.events.states import Market
from spotguard.launch.base import LaunchRequest
from spotguard.launch.local import LocalLauncher, LocalOptions
from spotguard.launch.local.files import create_json, is_locked, read_json, try_lock, write_json
from spotguard.launch.local.simulation_state import World, arrivals
from spotguard.testing import FakeClock

if TYPE_CHECKING:
    from pathlib import Path


def options(*interruptions: str, **more: Any) -> LocalOptions:
    """Return options with a script."""
    return LocalOptions(interruptions=interruptions, **more)


def write_trace(folder: Path, **parts: Any) -> str:
    """Write a trace of 100 s a tick and return its path."""
    metadata: dict[str, Any] = {"cloud": "aws", "zone": "us-east-2a", "instance": "p3.2xlarge"}
    metadata.update({"gap_seconds": 100, "on_demand_price": 5.0, **parts.pop("metadata", {})})
    path = folder / "trace.json"
    path.write_text(json.dumps({"metadata": metadata, "spot_price": None, **parts}))
    return str(path)


def request(launcher: LocalLauncher, nodes: int) -> LaunchRequest:
    """Return a request that would start nothing useful."""
    return LaunchRequest(
        cluster="c1",
        run_id="r1",
        attempt=1,
        nodes=nodes,
        nproc_per_node=1,
        script="/nowhere.py",
        args=(),
        workdir="/",
        env={},
        offer=launcher.offers()[0],
        max_lifetime_s=None,
    )


def test_time_begins_once(tmp_path: Path) -> None:
    """The run's time and seed are those of its first launch, whoever looks later."""
    clock = FakeClock()
    first = World(tmp_path, options(), clock)
    before = first.elapsed_s
    first.begin()
    clock.advance(10)
    second = World(tmp_path, options(seed=3), clock)
    second.begin()

    assert before == 0.0
    assert first.elapsed_s == second.elapsed_s == 10.0
    assert first.seed == second.seed


def test_a_scripted_interruption_is_claimed_once(tmp_path: Path) -> None:
    """Of two processes that find it due, one may do it; equal entries are each their own."""
    world = World(tmp_path, options("all@step=1:kill", "all@step=1:kill"), FakeClock())
    world.begin()
    other = World(tmp_path, options("all@step=1:kill", "all@step=1:kill"), FakeClock())
    first, second = world.pending()

    assert world.claim(first)
    assert not other.claim(first)
    assert [scripted.key for scripted in other.pending()] == [second.key]


def test_capacity_changes_by_time_though_nothing_runs(tmp_path: Path) -> None:
    """Capacity that comes back while no cluster runs is there for the next launch."""
    clock = FakeClock()
    world = World(tmp_path, options("capacity=3@t=30s", "capacity=1@t=10s"), clock)
    world.begin()
    seen = []
    for _ in range(4):
        world.claim_due_capacity()
        seen.append(world.capacity())
        clock.advance(15)

    assert seen == [None, 1, 3, 3]


def test_random_interruptions_depend_on_the_seed_alone() -> None:
    """The same seed gives the same times, nodes and ways; about one in each mean time."""
    first = list(itertools.islice(arrivals(7, 60.0), 2000))

    assert first == list(itertools.islice(arrivals(7, 60.0), 2000))
    assert first != list(itertools.islice(arrivals(8, 60.0), 2000))
    assert first[-1].at_s / 2000 == pytest.approx(60.0, rel=0.1)
    assert len({arrival.how for arrival in first}) == 3


def test_random_interruptions_of_the_past_are_past(tmp_path: Path) -> None:
    """A later cluster gets what comes after its start, as if the world had gone on meanwhile."""
    world = World(tmp_path, options(mtbf_s=60.0, seed=7), FakeClock())
    world.begin()
    every = list(itertools.islice(world.arrivals_from(0.0), 20))

    assert list(itertools.islice(world.arrivals_from(every[4].at_s), 15)) == every[5:]


def test_a_trace_rules_capacity_and_prices(tmp_path: Path) -> None:
    """Offers cost what the trace says now, and what it has not got cannot be launched."""
    clock = FakeClock()
    trace = write_trace(tmp_path, capacity=[1, 2, 0], spot_price=[0.5, 0.75, 1.0])
    launcher = LocalLauncher(tmp_path, options(trace=trace, speed_up=10.0), clock=clock)

    with pytest.raises(NoCapacity, match="the trace has 1 node now, 2 were asked"):
        launcher.launch(request(launcher, 2))
    spot, on_demand = launcher.offers()
    clock.advance(20)
    later = launcher.offers()[0]

    assert (spot.region, spot.zone, spot.instance_type) == ("us-east-2", "us-east-2a", "p3.2xlarge")
    assert (spot.market, spot.price_usd_per_h, spot.on_demand_usd_per_h) == (Market.SPOT, 0.5, 5.0)
    assert (on_demand.market, on_demand.price_usd_per_h) == (Market.ON_DEMAND, 5.0)
    assert later.price_usd_per_h == 1.0
    with pytest.raises(NoCapacity, match="has 0 nodes now, 1 were asked"):
        launcher.launch(request(launcher, 1))


def test_no_capacity_starts_nothing_but_time(tmp_path: Path) -> None:
    """A refused launch leaves no cluster, yet the trace goes on, so that waiting helps."""
    clock = FakeClock()
    trace = write_trace(tmp_path, capacity=[0, 3])
    launcher = LocalLauncher(tmp_path, options(trace=trace), clock=clock)
    with pytest.raises(NoCapacity):
        launcher.launch(request(launcher, 1))
    clock.advance(100)

    assert not (tmp_path / "local" / "clusters").exists()
    with pytest.raises(NoCapacity, match="the trace has 3 nodes now"):
        launcher.launch(request(launcher, 4))


def test_prices_asked_for_win_over_the_trace(tmp_path: Path) -> None:
    """A price given by the user is the price; without any there is the documented default."""
    trace = write_trace(tmp_path, capacity=[1], spot_price=[0.5])
    given = options(trace=trace, price_usd_per_h=2.0, on_demand_usd_per_h=4.0)
    bare = LocalLauncher(tmp_path, options()).offers()[0]
    offer = LocalLauncher(tmp_path, given).offers()[0]

    assert (offer.price_usd_per_h, offer.on_demand_usd_per_h) == (2.0, 4.0)
    assert (bare.price_usd_per_h, bare.on_demand_usd_per_h) == (0.918, 3.06)


def test_options_survive_their_json() -> None:
    """What the launcher writes down is what the cloud process reads."""
    given = options("all@step=1:kill", mtbf_s=3.0, seed=1, price_usd_per_h=0.1)

    assert LocalOptions.from_json(json.loads(json.dumps(given.to_json()))) == given


def test_files_are_whole_and_first_come(tmp_path: Path) -> None:
    """Replacing leaves nothing else behind; creating never replaces."""
    path = tmp_path / "state.json"

    assert read_json(path) is None
    assert create_json(path, {"n": 1})
    assert not create_json(path, {"n": 2})
    assert read_json(path) == {"n": 1}
    write_json(path, {"n": 3})
    assert read_json(path) == {"n": 3}
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_a_lock_is_seen_from_outside(tmp_path: Path) -> None:
    """A held lock is seen and cannot be taken; looking does not take it."""
    import os

    path = tmp_path / "lock"
    before = is_locked(path)
    held = try_lock(path)
    assert held is not None
    during = (is_locked(path), try_lock(path))
    os.close(held)

    assert not before
    assert during == (True, None)
    assert not is_locked(path)
