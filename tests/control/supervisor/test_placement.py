from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.journal.nodes.offer import place_key
from spotguard.control.journal.record import Limits
from spotguard.control.supervisor.actions import BackOff, Intend
from spotguard.control.supervisor.next_nodes import next_launch
from spotguard.control.supervisor.placement.advice import (
    advised,
    markets_now,
    offers_now,
    paced_nodes,
    will_buy_later,
)
from spotguard.control.supervisor.placement.moves import (
    back_to_spot_due,
    may_go_back_to_spot,
    may_move,
    move_due,
    regrow_due,
)
from spotguard.control.supervisor.placement.seen_places import place_name, seen_of
from spotguard.control.supervisor.placement.time_left import undone_s, work_left_s
from spotguard.control.supervisor.policy import Policy
from spotguard.events.states import EndReason, Market
from spotguard.policy.market.hazard import pooled
from spotguard.policy.market.sightings import FREE, Sighting
from spotguard.testing.launcher import FAKE_OFFER
from tests.control.made import (
    Line,
    ended,
    intended,
    launched,
    made,
    node_ended,
    saved,
    training,
)

if TYPE_CHECKING:
    from spotguard.control.journal.record import RunRecord
    from spotguard.control.supervisor.actions import Action
    from spotguard.launch.base import Offer

SPOT, ON_DEMAND = Market.SPOT, Market.ON_DEMAND
OTHER = replace(FAKE_OFFER, zone="here-b")
DEAR = replace(FAKE_OFFER, market=ON_DEMAND, price_usd_per_h=3.0)
NEVER = Policy(market=SPOT)
AFTER = Policy(market=SPOT, on_demand_after_s=1200.0)
DEADLINE = Policy(market=SPOT, on_demand_for_deadline=True)


def refused(at: float, *, nodes: int = 2, offer: Offer = FAKE_OFFER) -> tuple[Line, Line]:
    """A launch is refused at once."""
    data = {"nodes": nodes, "place": place_key(offer), "problem": "none"}
    return intended(at, nodes=nodes), ("no_capacity", at, 1, data)


def trained(*, step: int = 500, step_s: float = 1.0, nodes: int = 2) -> tuple[Line, ...]:
    """An attempt started after 60 s and did some of 1000 steps, all saved; it still lives."""
    progress = {"step": step, "total_steps": 1000, "step_s": step_s}
    lines = (*launched(0.0, nodes=nodes), training(60.0), ("progress", 600.0, 1, progress))
    return (*lines, saved(599.0, step), saved(600.0, step)) if step else lines


# 500 steps are left, and a start of 60 s; 10 s are kept for the last save and the nodes' end. A
# start that comes to nothing costs 120 s, for which there must be time. Of a job without a pace all
# of the time is taken for work but a tenth of that.
MARKETS: dict[str, tuple[Policy, tuple[Line, ...], float | None, float, set[Market]]] = {
    "whatever is offered": (Policy(), (), None, 0.0, {SPOT, ON_DEMAND}),
    "on demand only": (Policy(market=ON_DEMAND), (), None, 0.0, {ON_DEMAND}),
    "never, nothing waited": (NEVER, (), None, 0.0, {SPOT}),
    "never, waited for ever": (NEVER, refused(0.0), None, 1e6, {SPOT}),
    "after, nothing waited": (AFTER, (), None, 1e6, {SPOT}),
    "after, not yet": (AFTER, refused(100.0), None, 1299.0, {SPOT}),
    "after, now": (AFTER, refused(100.0), None, 1300.0, {SPOT, ON_DEMAND}),
    "after, counts from the first refusal": (
        AFTER,
        (*refused(100.0), *refused(900.0)),
        None,
        1300.0,
        {SPOT, ON_DEMAND},
    ),
    "deadline, there is none": (DEADLINE, trained(), None, 700.0, {SPOT}),
    "deadline, far": (DEADLINE, trained(), 700.0 + 691.0, 700.0, {SPOT}),
    "deadline, no time for spot that fails": (
        DEADLINE,
        trained(),
        700.0 + 689.0,
        700.0,
        {ON_DEMAND},
    ),
    "deadline, slack above a tenth": (DEADLINE, trained(step_s=20.0), 11_808.0, 700.0, {SPOT}),
    "deadline, presses, and spot is as good": (
        DEADLINE,
        trained(step_s=20.0),
        11_806.0,
        700.0,
        {SPOT, ON_DEMAND},
    ),
    "deadline, passed": (DEADLINE, trained(), 100.0, 700.0, {ON_DEMAND}),
    "deadline, nobody knows the pace": (DEADLINE, launched(), 100.0, 50.0, {ON_DEMAND}),
    "deadline, never ran, early": (DEADLINE, refused(100.0), 110_000.0, 4959.0, {SPOT}),
    "deadline, never ran, presses": (
        DEADLINE,
        refused(100.0),
        110_000.0,
        4961.0,
        {SPOT, ON_DEMAND},
    ),
    "deadline, never ran, at last": (DEADLINE, refused(100.0), 110_000.0, 9871.0, {ON_DEMAND}),
    "deadline, ran at an unknown pace": (
        DEADLINE,
        (
            *launched(),
            training(),
            ended(50.0, "vanished"),
            ("waiting", 100.0, None, {"retry_at": 1}),
        ),
        110_000.0,
        9960.0,
        {ON_DEMAND},
    ),
    "deadline near, but never on demand": (NEVER, trained(), 710.0, 700.0, {SPOT}),
}


@pytest.mark.parametrize("name", MARKETS)
def test_the_rule_says_what_may_be_bought(name: str) -> None:
    """The whole table of rules, waits and deadlines."""
    policy, lines, deadline_at, now, markets = MARKETS[name]
    limits = Limits(nodes_min=1, nodes_max=2, deadline_at=deadline_at)
    assert markets_now(made(*lines, limits=limits), now, policy) == markets


def test_waiting_survives_a_launch_that_is_refused_late() -> None:
    """A launch that was taken and came to nothing does not start the 20 minutes anew."""
    late = {"nodes": 2, "place": place_key(OTHER), "problem": "none", "late": True}
    lines = (*refused(100.0), *launched(200.0), ("no_capacity", 260.0, 1, late))
    assert markets_now(made(*lines), 1299.0, AFTER) == {SPOT}
    assert markets_now(made(*lines), 1300.0, AFTER) == {SPOT, ON_DEMAND}


def order(lines: tuple[Line, ...], now: float, policy: Policy, *offers: Offer) -> list[Offer]:
    """Return the offers as they are asked."""
    return offers_now(made(*lines), offers or (FAKE_OFFER, OTHER, DEAR), now, policy)


@pytest.mark.parametrize(
    ("reason", "avoided"),
    [
        ("preempted", True),
        ("terminated", True),
        ("node_lost", True),
        ("vanished", True),
        ("resized", False),
        ("failed", False),
        ("budget", False),
    ],
)
def test_a_place_that_took_nodes_is_asked_last_for_a_while(reason: str, avoided: bool) -> None:
    """Only for nodes that were taken, only for half an hour, and never before on demand."""
    lines = (*launched(), training(), ended(100.0, reason, last_step=5))
    policy = Policy()
    soon = order(lines, 100.0 + policy.avoid_lost_place_s - 1, policy)
    assert soon == ([OTHER, FAKE_OFFER, DEAR] if avoided else [FAKE_OFFER, OTHER, DEAR])
    later = order(lines, 100.0 + policy.avoid_lost_place_s, policy)
    assert later == [FAKE_OFFER, OTHER, DEAR]


@pytest.mark.parametrize("in_vain", [False, True])
def test_a_launch_that_came_to_nothing_is_no_loss_of_its_place(in_vain: bool) -> None:
    """One instance too many says nothing of the spot market: nobody took a node."""
    up = ("cluster_up", 30.0, 1, {"at": 30.0})
    lost = node_ended(100.0, end="lost", in_doubt=True, in_vain=in_vain)
    lines = (*launched(), up, lost, ended(110.0, "node_lost"))
    first = OTHER if not in_vain else FAKE_OFFER
    assert order(lines, 120.0, Policy())[0] == first
    seen = seen_of(made(*lines), FAKE_OFFER, 2, 120.0, pooled("", 2))
    assert (seen.taken > 0, seen.up) == (not in_vain, in_vain)


def test_what_may_not_be_bought_is_not_asked() -> None:
    """The market's rule has the word, spot comes first where both are allowed."""
    assert order((), 0.0, NEVER, DEAR, OTHER) == [OTHER]
    assert order((), 0.0, Policy(market=ON_DEMAND), FAKE_OFFER, DEAR) == [DEAR]
    assert order((), 0.0, Policy(), DEAR, OTHER) == [OTHER, DEAR]


def on_demand() -> tuple[Line, ...]:
    """An attempt that had to be bought on demand trains."""
    kind, at, attempt, data = intended()
    data["offer"]["market"] = ON_DEMAND.value
    return (kind, at, attempt, data), ("launched", at, attempt), *trained()[2:]


BACK: dict[str, tuple[tuple[Line, ...], Policy, float | None, float, bool]] = {
    "not yet": (on_demand(), AFTER, None, 3599.0, False),
    "an hour later": (on_demand(), AFTER, None, 3600.0, True),
    "it is on spot": (trained(), AFTER, None, 3600.0, False),
    "you wanted on demand": (on_demand(), Policy(market=ON_DEMAND), None, 3600.0, False),
    "whatever is offered": (on_demand(), Policy(), None, 3600.0, False),
    "the deadline presses": (on_demand(), DEADLINE, 3700.0, 3600.0, False),
    "the deadline is far": (on_demand(), DEADLINE, 9000.0, 3600.0, True),
}


@pytest.mark.parametrize("name", BACK)
def test_it_goes_back_to_spot_when_that_is_wanted_and_safe(name: str) -> None:
    """The whole table of when an on-demand attempt looks for spot nodes again."""
    lines, policy, deadline_at, now, due = BACK[name]
    record = made(*lines, limits=Limits(nodes_max=2, deadline_at=deadline_at))
    assert back_to_spot_due(record, record.attempts[0], now, policy, free_spot=2) is due


HOURS = 3600.0
SLOW = Policy(
    market=SPOT,
    on_demand_for_deadline=True,
    start_s=600.0,
    ask_s=600.0,
    save_s=10.0,
    teardown_s=225.0,
)
CHEAP = replace(FAKE_OFFER, price_usd_per_h=1.0, instance_type="p3.2xlarge")
THERE = replace(CHEAP, zone="here-b", price_usd_per_h=1.5)
PAID = replace(CHEAP, market=ON_DEMAND, price_usd_per_h=3.0)
PLACES = (CHEAP, THERE, PAID)


def advice(
    *lines: Line, now: float, deadline_h: float, offers: tuple[Offer, ...] = PLACES
) -> tuple[list[Offer], str]:
    """Return what may be bought under a deadline, and why."""
    limits = Limits(nodes_min=2, nodes_max=2, deadline_at=deadline_h * HOURS)
    told = advised(made(*lines, limits=limits), offers, 2, now, SLOW)
    return list(told.offers), told.why


def paced(*, left_h: float, at: float, reason: str = "preempted") -> tuple[Line, ...]:
    """An attempt trained for a while and was ended; so much work is left."""
    progress = {"step": 100, "total_steps": 100 + int(left_h * 60), "step_s": 60.0}
    return (
        *launched(0.0, nodes=2),
        training(600.0),
        ("progress", at - 1, 1, progress),
        saved(at - 2, 98),
        saved(at - 1, 100),
        ended(at, reason, last_step=100),
    )


@pytest.mark.parametrize(("gigabytes", "first"), [(1.0, "eu-west-1"), (1000.0, "us-east-1")])
def test_places_are_asked_by_what_it_costs_to_get_there(gigabytes: float, first: str) -> None:
    """A start reads the checkpoint from the store, whose cloud charges for other regions."""
    store = "s3://bucket/runs?region=us-east-1"
    lines = (*paced(left_h=10, at=7200.0)[:-1], saved(7199.0, 100, size_bytes=gigabytes * 1e9))
    lines = (*lines, ended(7200.0, "preempted", last_step=100))
    near = replace(CHEAP, infra="aws", region="us-east-1", zone="us-east-1a", price_usd_per_h=1.5)
    far = replace(near, region="eu-west-1", zone="eu-west-1a", price_usd_per_h=1.0)
    record = made(*lines, limits=Limits(nodes_min=2, nodes_max=2, deadline_at=100 * HOURS))
    record = replace(record, store_root=store)
    offers = (far, near, replace(near, market=ON_DEMAND, price_usd_per_h=9.0))
    told = advised(record, offers, 2, 7200.0, SLOW)
    assert told.offers[0].region == first


def test_a_place_that_keeps_taking_nodes_gives_way_to_a_steady_one() -> None:
    """Three lives of minutes there weigh more than ten per cent of the price."""
    lines: list[Line] = []
    for number, at in enumerate((0.0, 3600.0, 7200.0), 1):
        lines += [*launched(at, number, nodes=2), training(at + 600, number)]
        lines += [ended(at + 900, "preempted", number)]
    here = replace(FAKE_OFFER, price_usd_per_h=1.0)
    steady = replace(CHEAP, zone="steady", price_usd_per_h=1.1)
    offers = (here, steady, PAID)
    told, _ = advice(*lines, now=10_800.0, deadline_h=100.0, offers=offers)
    fresh, _ = advice(now=10_800.0, deadline_h=100.0, offers=offers)
    assert told[0].zone == "steady"
    assert fresh[0].zone == here.zone


def test_spot_dearer_than_on_demand_is_asked_last() -> None:
    """Where either may be bought, nothing speaks for the dearer one that may be taken, too."""
    dear = replace(CHEAP, price_usd_per_h=3.5)
    asked = offers_now(made(), [dear, CHEAP, PAID], 0.0, Policy())
    assert [each.price_usd_per_h for each in asked] == [1.0, 3.0, 3.5]


def test_an_attempt_that_took_no_step_does_not_silence_the_deadline() -> None:
    """It started and showed no pace: on demand is bought before it is too late, all the same."""
    lines = (*launched(0.0, nodes=2), training(600.0), ended(700.0, "preempted"))
    limits = Limits(nodes_min=1, nodes_max=2, deadline_at=11 * HOURS)
    record = made(*lines, limits=limits)
    assert ON_DEMAND in markets_now(record, 0.9 * HOURS, SLOW)
    assert advice(*lines, now=0.9 * HOURS, deadline_h=11.0)[0] == [PAID]


def test_a_job_that_never_ran_waits_for_less_than_its_slack() -> None:
    """Of 26.4 hours for 24 hours of work, the 144 minutes of slack are not waited away."""
    lines = refused(10.0, nodes=2, offer=CHEAP)
    limits = Limits(nodes_min=2, nodes_max=2, deadline_at=26.4 * HOURS)
    assert ON_DEMAND in markets_now(made(*lines, limits=limits), 120 * 60.0, SLOW)
    assert advice(*lines, now=130 * 60.0, deadline_h=26.4)[0] == [PAID]


def test_until_a_pace_is_known_the_work_is_what_the_user_says() -> None:
    """With 4 of 5 hours of work to do, unsaid, there is no time for a spot node that may not come.

    Said of all nodes, it takes twice as long on half of them. What the run shows counts more.
    """
    limits = Limits(nodes_min=1, nodes_max=2, deadline_at=5 * HOURS)
    unsaid = made(limits=limits)
    said = replace(unsaid, spec={**unsaid.spec, "work_s": 4 * HOURS})
    assert advised(unsaid, PLACES, 2, 0.0, SLOW).offers == (PAID,)
    assert advised(said, PLACES, 2, 0.0, SLOW).offers[0] == CHEAP
    assert advised(said, PLACES, 1, 0.0, SLOW).offers == (PAID,)
    shown = made(*paced(left_h=4.5, at=600.0), limits=limits)
    shown = replace(shown, spec={**shown.spec, "work_s": 1 * HOURS})
    assert advised(shown, PLACES, 2, 600.0, SLOW).offers == (PAID,)


def test_spot_that_is_there_is_bought_although_the_deadline_presses() -> None:
    """Little slack forbids to wait, not to buy spot, as long as its loss could be borne."""
    lines = paced(left_h=20.0, at=1 * HOURS)
    offers, why = advice(*lines, now=1 * HOURS, deadline_h=22.5)
    assert offers[0].market is SPOT
    assert "spot in" in why
    limits = Limits(nodes_min=2, nodes_max=2, deadline_at=22.5 * HOURS)
    assert markets_now(made(*lines, limits=limits), 1 * HOURS, SLOW) == {SPOT, ON_DEMAND}


def test_a_start_is_kept_in_reserve() -> None:
    """With 200 s of slack and starts of 600 s, nothing but on demand is bought."""
    lines = paced(left_h=20.0, at=1 * HOURS)
    deadline_h = 21.0 + (600 + 235 + 200) / HOURS
    offers, why = advice(*lines, now=1 * HOURS, deadline_h=deadline_h)
    assert offers == [PAID]
    assert "could miss the deadline" in why


def test_the_longest_start_counts_not_the_shortest() -> None:
    """One quick start does not promise another."""
    slow = (*launched(0.0, 1, nodes=2), training(3000.0, 1), ended(3600.0, "preempted", 1))
    quick = (
        *launched(3600.0, 2, nodes=2),
        training(3700.0, 2),
        ("progress", 4000.0, 2, {"step": 9, "total_steps": 609, "step_s": 60.0}),
        ended(4000.0, "preempted", 2, last_step=9),
    )
    deadline_h = (4000 + 36_000 + 235 + 3000 + 3000) / HOURS
    assert advice(*slow, *quick, now=4000.0, deadline_h=deadline_h)[0] == [PAID]
    assert advice(*quick, now=4000.0, deadline_h=deadline_h)[0] != [PAID]


def test_the_reason_to_wait_is_told() -> None:
    """With all spot places refused and much slack, it waits, and says for what and how long."""
    gone = [
        ("no_capacity", 7200.0, 2, {"nodes": 2, "place": place_key(offer), "problem": "none"})
        for offer in (CHEAP, THERE)
    ]
    lines = (*paced(left_h=5.0, at=7000.0), intended(7100.0, 2, nodes=2), *gone)
    offers, why = advice(*lines, now=7200.0, deadline_h=40.0)
    assert offers == []
    assert why.startswith("waits: spot in ")
    assert "the deadline leaves" in why


def test_a_place_that_says_that_it_has_nodes_answers() -> None:
    """It is known to have them, unless it has just refused them; of too few nothing follows."""
    record, hazard = made(limits=Limits(nodes_min=2, nodes_max=2)), pooled("", 2)
    free = (free_nodes(THERE, 2),)
    assert seen_of(record, THERE, 2, 60.0, hazard, free).answers is True
    assert seen_of(record, THERE, 3, 60.0, hazard, free).answers is None
    assert seen_of(record, CHEAP, 2, 60.0, hazard, free).answers is None
    record = made(*refused(50.0, offer=THERE))
    assert seen_of(record, THERE, 2, 60.0, hazard, free).answers is False


@pytest.mark.parametrize(
    ("free", "change", "due"),
    [
        ((CHEAP, 2), {}, True),
        ((CHEAP, 1), {}, False),
        (None, {}, False),
        ((CHEAP, 2), {"infra": "aws"}, False),
        ((CHEAP, 2), {"price_usd_per_h": None}, False),
        ((CHEAP, 2), {"price_usd_per_h": 1.005}, False),
        ((CHEAP, 2), {"market": ON_DEMAND}, False),
    ],
)
def test_spot_nodes_are_given_up_only_for_cheaper_ones_that_are_known_to_be_free(
    free: tuple[Offer, int] | None, change: dict[str, Any], due: bool
) -> None:
    """Clouds tell nobody; on-demand nodes have a rule of their own."""
    progress = {"step": 100, "total_steps": 2500, "step_s": 60.0}
    lines = (*launched(0.0, nodes=2), training(600.0), ("progress", 6000.0, 1, progress))
    limits = Limits(nodes_min=2, nodes_max=2, deadline_at=100 * HOURS)
    record = made(*lines, limits=limits)
    here = replace(record.attempts[0].offer, zone="here-c", price_usd_per_h=2.5)
    attempt = replace(record.attempts[0], offer=replace(here, **change))
    market = () if free is None else (free_nodes(*free),)
    offers = (*PLACES, here)
    assert move_due(record, attempt, offers, 6000.0, SLOW, market=market) is due
    never = replace(SLOW, on_demand_for_deadline=False)
    assert not move_due(record, attempt, offers, 6000.0, never, market=market)


def may_be_moved(*prices: float, reason: EndReason = EndReason.MOVED, age_s: float) -> bool:
    """Tell whether the last of attempts with these prices may be moved at that age."""
    limits = Limits(nodes_min=2, nodes_max=2, deadline_at=100 * HOURS)
    now_on = made(*launched(0.0, nodes=2), training(600.0), limits=limits).attempts[0]
    gone = made(*launched(0.0, nodes=2), training(600.0), ended(700.0, reason.value)).attempts[0]
    before = [
        replace(gone, offer=replace(gone.offer, price_usd_per_h=each)) for each in prices[:-1]
    ]
    last = replace(now_on, offer=replace(now_on.offer, price_usd_per_h=prices[-1]))
    record = replace(made(limits=limits), attempts=(*before, last))
    return may_move(record, last, last.intended_at + age_s, SLOW)


def test_moves_that_led_nowhere_make_the_next_one_later() -> None:
    """A place may say that it has nodes and never give them: each try costs a save and a start."""
    assert may_be_moved(2.0, age_s=700.0)
    assert may_be_moved(2.0, 1.0, age_s=700.0), "that move was worth it"
    assert may_be_moved(2.0, 2.0, reason=EndReason.PREEMPTED, age_s=700.0)
    for vain, hours in ((1, 2), (2, 4), (5, 32), (50, 32)):
        prices = (2.0,) * (vain + 1)
        assert not may_be_moved(*prices, age_s=hours * HOURS - 1), vain
        assert may_be_moved(*prices, age_s=hours * HOURS), vain
    assert may_be_moved(*(2.0,) * 5, 1.0, age_s=700.0), "the last one was worth it"


def test_nodes_are_not_moved_from_a_place_without_a_price() -> None:
    """Nothing is cheaper than what nobody knows; its controller must not end for it either."""
    progress = {"step": 100, "total_steps": 2500, "step_s": 60.0}
    lines = (*launched(0.0, nodes=2), training(600.0), ("progress", 6000.0, 1, progress))
    limits = Limits(nodes_min=2, nodes_max=2, deadline_at=100 * HOURS)
    record = made(*lines, limits=limits)
    here = replace(record.attempts[0].offer, zone="here-c", price_usd_per_h=2.5)
    attempt = replace(record.attempts[0], offer=here)
    market = (free_nodes(CHEAP, 2),)
    unpriced = replace(here, price_usd_per_h=None)
    assert move_due(record, attempt, (*PLACES, here), 6000.0, SLOW, market=market)
    assert not move_due(record, attempt, PLACES, 6000.0, SLOW, market=market)
    assert not move_due(record, attempt, (*PLACES, unpriced), 6000.0, SLOW, market=market)
    spot = [each for each in (*PLACES, here) if each.market is SPOT]
    assert not move_due(record, attempt, spot, 6000.0, SLOW, market=market), "nothing to fall on"


@pytest.mark.parametrize(
    ("slack_s", "market"), [(500.0, ON_DEMAND), (790.0, ON_DEMAND), (1600.0, SPOT)]
)
@pytest.mark.parametrize("free", [False, True])
def test_a_place_that_says_it_has_nodes_may_still_refuse_them(
    slack_s: float, market: Market, free: bool
) -> None:
    """A start takes 100 s, a refusal 600: after it there must be time for two starts."""
    progress = {"step": 100, "total_steps": 220, "step_s": 60.0}
    lines: tuple[Line, ...] = (
        *launched(0.0, nodes=2),
        training(100.0),
        ("progress", 6999.0, 1, progress),
    )
    limits = Limits(nodes_min=2, nodes_max=2, deadline_at=7200.0 + 2 * HOURS + 235.0 + slack_s)
    lines = (*lines, saved(6990.0, 99), saved(6999.0, 100))
    record = made(*lines, ended(7000.0, "preempted", last_step=100), limits=limits)
    said = (free_nodes(CHEAP, 2), free_nodes(THERE, 2)) if free else ()
    told = advised(record, PLACES, 2, 7200.0, SLOW, market=said)
    assert {offer.market for offer in told.offers} == {market}


def free_nodes(offer: Offer, nodes: int) -> Sighting:
    """A place says that it has so many nodes now."""
    return Sighting(at=0.0, kind=FREE, place=place_name(offer), nodes=nodes)


@pytest.mark.parametrize("deadline", [True, False])
def test_no_spot_node_above_the_greatest_price_is_bought(deadline: bool) -> None:
    """Neither a dear one nor one of unknown price; on demand is not bound by it."""
    unpriced = replace(CHEAP, zone="here-c", price_usd_per_h=None)
    policy = replace(SLOW, max_usd_per_h=1.2, on_demand_for_deadline=deadline)
    limits = Limits(nodes_max=2, deadline_at=20 * HOURS)
    told = advised(made(limits=limits), (*PLACES, unpriced), 2, 0.0, policy)
    assert told.offers == (CHEAP,)
    open_market = replace(policy, market=None)
    every = advised(made(), (*PLACES, unpriced), 2, 0.0, open_market)
    assert every.offers == (CHEAP, PAID)


@pytest.mark.parametrize(
    ("policy", "deadline_at", "offers", "later"),
    [
        (SLOW, 200_000.0, PLACES, True),
        (SLOW, 90_000.0, PLACES, False),
        (SLOW, 200_000.0, (CHEAP,), False),
        (SLOW, None, PLACES, False),
        (NEVER, 200_000.0, PLACES, False),
        (AFTER, None, PLACES, False),
        (replace(AFTER, on_demand_after_s=1e6), None, PLACES, True),
    ],
)
def test_whether_on_demand_may_yet_be_bought(
    policy: Policy, deadline_at: float | None, offers: tuple[Offer, ...], later: bool
) -> None:
    """A run whose rule will buy on demand does not give up for want of spot nodes."""
    record = made(*refused(100.0), limits=Limits(nodes_max=2, deadline_at=deadline_at))
    assert will_buy_later(record, offers, 100_000.0, policy) is later


def on_demand_again(times: int) -> RunRecord:
    """A run that gave up on-demand nodes so often, and trains on demand again each time."""
    record = made(*on_demand(), limits=Limits(nodes_min=2, nodes_max=2))
    ends = made(*on_demand(), ended(600.0, "resized"), limits=record.limits).attempts
    return replace(record, attempts=(*ends * times, *record.attempts))


@pytest.mark.parametrize(
    ("free", "due"), [(None, False), (0, False), (1, False), (2, True), (3, True)]
)
def test_on_demand_nodes_are_kept_unless_enough_spot_nodes_are_known_to_be_free(
    free: int | None, due: bool
) -> None:
    """Paid nodes are given up only for a place that has answered that it has enough."""
    record = on_demand_again(0)
    assert back_to_spot_due(record, record.attempts[0], 3600.0, AFTER, free_spot=free) is due


def test_looking_for_spot_in_vain_makes_the_next_look_later() -> None:
    """An hour, two, four … up to 32: each one costs a start, and the wait for on-demand nodes."""
    for times, hours in ((0, 1), (1, 2), (2, 4), (5, 32), (50, 32)):
        record = on_demand_again(times)
        attempt, due_s = record.attempts[-1], hours * 3600.0
        assert not back_to_spot_due(record, attempt, due_s - 1.0, AFTER, free_spot=2), times
        assert back_to_spot_due(record, attempt, due_s, AFTER, free_spot=2), times
        assert not may_go_back_to_spot(record, attempt, due_s - 301.0, AFTER)
        assert may_go_back_to_spot(record, attempt, due_s - 300.0, AFTER)
    record = made(*trained())
    assert not may_go_back_to_spot(record, record.attempts[0], 1e6, AFTER), "it is on spot"


GROW = Policy(regrow_startups=3.0)


def regrows(
    now: float,
    *,
    before: tuple[tuple[int, EndReason], ...] = (),
    nodes_max: int = 3,
    free: int | None = None,
    **how: Any,
) -> bool:
    """Tell whether an attempt on two nodes is launched anew; its start took 60 s.

    `before` are the attempts before it: on how many nodes, and how each ended.
    """
    record = made(*trained(**how), limits=Limits(nodes_min=1, nodes_max=nodes_max))
    now_on = record.attempts[0]
    ends = made(*trained(**how), ended(600.0, "resized")).attempts[0]
    assert ends.end is not None
    gone = [
        replace(ends, nodes=nodes, end=replace(ends.end, reason=reason)) for nodes, reason in before
    ]
    record = replace(record, attempts=(*gone, now_on), refused=7)
    return regrow_due(record, now_on, now, GROW, free_nodes=free)


def test_regrowing_waits_for_three_starts_and_twice_as_long_after_each_try_in_vain() -> None:
    """180 s, 360 s, 720 s … up to 2 ** 5 times: what was refused is not asked for all the time."""
    for tries, first_s in ((0, 180.0), (1, 360.0), (2, 720.0), (5, 5760.0), (50, 5760.0)):
        before = ((2, EndReason.RESIZED),) * tries
        assert not regrows(first_s - 1.0, before=before, step_s=60.0), tries
        assert regrows(first_s, before=before, step_s=60.0), tries


@pytest.mark.parametrize(
    "before",
    [
        (),
        ((1, EndReason.RESIZED),),
        ((2, EndReason.PREEMPTED),),
        ((2, EndReason.RESIZED), (3, EndReason.PREEMPTED)),
        ((2, EndReason.RESIZED), (2, EndReason.RESIZED), (1, EndReason.RESIZED)),
    ],
)
def test_only_tries_since_the_last_change_count(before: tuple[tuple[int, EndReason], ...]) -> None:
    """Neither what the first launch was refused, nor what failed before it grew or lost nodes."""
    assert not regrows(179.0, before=before, step_s=60.0)
    assert regrows(180.0, before=before, step_s=60.0)


@pytest.mark.parametrize(
    "before",
    [
        ((2, EndReason.RESIZED), (2, EndReason.RESIZED), (2, EndReason.PREEMPTED)),
        ((2, EndReason.RESIZED), (2, EndReason.PREEMPTED), (2, EndReason.RESIZED)),
        ((2, EndReason.PREEMPTED), (2, EndReason.RESIZED), (2, EndReason.RESIZED)),
        ((3, EndReason.PREEMPTED), (2, EndReason.RESIZED), (2, EndReason.RESIZED)),
    ],
)
def test_nodes_that_were_replaced_by_as_many_are_no_change(
    before: tuple[tuple[int, EndReason], ...],
) -> None:
    """Where nodes are taken every hour, what was refused twice is still known the third time."""
    assert not regrows(719.0, before=before, step_s=60.0)
    assert regrows(720.0, before=before, step_s=60.0)


def test_nodes_are_kept_where_it_is_known_that_no_other_is_free() -> None:
    """They are given up for nothing else; unknown is asked for by trying."""
    assert not regrows(1e5, free=0, step_s=60.0)
    assert regrows(180.0, free=1, step_s=60.0)
    assert not regrows(179.0, free=1, step_s=60.0)
    assert regrows(180.0, free=None, step_s=60.0)


def test_regrowing_must_pay() -> None:
    """2 -> 3 nodes saves a third of what is left; that must be more than two starts of 60 s."""
    # 360 s on two nodes, of which a third node saves 120 s, are 500 steps of 0.72 s.
    assert not regrows(1e5, step_s=0.71)
    assert regrows(1e5, step_s=0.73)
    assert not regrows(1e5, step_s=60.0, step=1000)
    assert not regrows(1e5, step_s=60.0, nodes_max=2), "it has all that it may have"
    assert not regrows(1e5, step_s=0.0), "nobody knows the pace"


def test_without_start_ups_only_what_went_on_in_place_grows() -> None:
    """A local run begins at once on all that there is; only a regroup leaves nodes behind."""
    policy = Policy(regrow_after_s=30.0)
    record = made(*trained(), limits=Limits(nodes_max=3))
    assert not regrow_due(record, record.attempts[0], 1e5, policy)
    in_place = replace(record.attempts[0], members=(1, 2))
    assert not regrow_due(record, in_place, 29.0, policy)
    assert regrow_due(record, in_place, 30.0, policy)
    assert not regrow_due(record, replace(in_place, started_at=None), 30.0, policy)


def test_the_work_left_is_counted_in_the_best_pace_per_node() -> None:
    """Of all attempts the fastest counts; more nodes are that much faster."""
    record = made(
        *trained(step=400, step_s=2.0),
        ended(700.0, "preempted", last_step=400),
        *launched(700.0, 2, nodes=4),
        training(760.0, 2, step=400),
        ("progress", 800.0, 2, {"step": 600, "total_steps": 1000, "step_s": 0.5}),
        limits=Limits(nodes_max=4),
    )
    assert work_left_s(record, 1) == pytest.approx(400 * 2.0)
    assert work_left_s(record, 4) == pytest.approx(400 * 0.5)
    assert work_left_s(made(), 4) is None


def elastic(*lines: Line, budget_usd: float = 100.0, deadline_at: float = 360_000.0) -> RunRecord:
    """A run of one to eight nodes with a budget and a deadline."""
    limits = Limits(nodes_min=1, nodes_max=8, budget_usd=budget_usd, deadline_at=deadline_at)
    return made(*lines, limits=limits)


def test_a_budget_sets_the_pace_of_elastic_nodes() -> None:
    """What is to last for 100 h buys few nodes at a time, and more once there is more of it."""
    few, why = paced_nodes(elastic(), [FAKE_OFFER], 0.0, NEVER)
    many, _ = paced_nodes(elastic(budget_usd=400.0), [FAKE_OFFER], 0.0, NEVER)
    all_of_them, nothing = paced_nodes(elastic(budget_usd=4000.0), [FAKE_OFFER], 0.0, NEVER)
    assert 1 <= few < many < all_of_them == 8
    assert why == f"{few} of 8 nodes, for $100.00 are to last for 4 d 3 h"
    assert nothing == ""


def test_the_pace_of_the_money_never_misses_the_deadline() -> None:
    """Work that needs more nodes than the pace has them, whatever the pace."""
    progress = {"step": 0, "total_steps": 1000, "step_s": 1000.0}
    slow = (*launched(0.0, nodes=1), training(60.0), ("progress", 600.0, 1, progress))
    nodes, _ = paced_nodes(elastic(*slow), [FAKE_OFFER], 600.0, NEVER)
    assert nodes == 4, "1e6 s of work on one node, and a tenth more, by 3.6e5 s"


@pytest.mark.parametrize(
    ("limits", "policy", "offer"),
    [
        (Limits(nodes_min=1, nodes_max=8, budget_usd=100.0), NEVER, FAKE_OFFER),
        (Limits(nodes_min=1, nodes_max=8, deadline_at=360_000.0), NEVER, FAKE_OFFER),
        (Limits(nodes_min=1, nodes_max=8, budget_usd=1.0, deadline_at=9e5), Policy(), FAKE_OFFER),
        (
            Limits(nodes_min=1, nodes_max=8, budget_usd=1.0, deadline_at=9e5),
            NEVER,
            replace(FAKE_OFFER, price_usd_per_h=None),
        ),
    ],
)
def test_without_budget_deadline_price_or_market_all_nodes_are_asked_for(
    limits: Limits, policy: Policy, offer: Offer
) -> None:
    """The pace is the money over the time: without either there is none."""
    assert paced_nodes(made(limits=limits), [offer], 0.0, policy) == (8, "")


def test_what_is_paced_is_not_launched_anew_to_grow() -> None:
    """An attempt on as many nodes as the pace allows stays, however many are free."""
    progress = {"step": 10, "total_steps": 100_000, "step_s": 1.0}
    lines = (*launched(0.0, nodes=2), training(60.0), ("progress", 600.0, 1, progress))
    policy = replace(NEVER, regrow_startups=3.0)
    poor, rich = elastic(*lines), elastic(*lines, budget_usd=4000.0)
    attempts = poor.attempts[0], rich.attempts[0]
    assert not regrow_due(poor, attempts[0], 5000.0, policy, free_nodes=9)
    assert regrow_due(rich, attempts[1], 5000.0, policy, free_nodes=9)


def test_spot_is_asked_for_however_late_where_nothing_is_sold_on_demand() -> None:
    """There is nothing for which time could be kept: to wait would be to wait until the end."""
    late = made(*launched(0.0, nodes=2), limits=Limits(deadline_at=7200.0))
    assert markets_now(late, 7100.0, SLOW) == {ON_DEMAND}
    assert offers_now(late, [CHEAP, THERE], 7100.0, SLOW) == [CHEAP, THERE]
    assert offers_now(late, [CHEAP, DEAR], 7100.0, SLOW) == [DEAR]


def test_where_each_place_has_refused_the_policy_waits() -> None:
    """Spot is too dear, the one place on demand is full: no error, which would end a controller."""
    limits = Limits(nodes_max=2, deadline_at=4000.0)
    full = refused(100.0, offer=DEAR)
    policy = replace(DEADLINE, max_usd_per_h=0.5)
    advice = advised(made(*full, limits=limits), (FAKE_OFFER, DEAR), 2, 100.0, policy)
    assert advice.offers == ()
    assert advice.why.startswith("waits")


def test_fewer_nodes_are_no_reason_to_buy_on_demand() -> None:
    """With four there is time to wait for spot: one alone, which would be late, is not bought.

    Fewer on spot are, and once not even four on demand could wait any longer, those are.
    """
    limits = Limits(nodes_min=1, nodes_max=4, deadline_at=40 * HOURS)
    record = made(limits=limits)
    record = replace(record, spec={**record.spec, "work_s": 18 * HOURS})

    def next_one(now: float, *refused_on: int, over: tuple[int, ...] = ()) -> Action:
        tried = [(n, place_key(each)) for n in refused_on for each in (CHEAP, THERE)]
        tried += [(n, place_key(PAID)) for n in over]
        return next_launch(replace(record, tried=tuple(tried), mendable=True), PLACES, now, SLOW)

    nowhere = next_one(0.0, 1, 2, 3, 4)
    assert isinstance(nowhere, BackOff), nowhere
    assert nowhere.why.startswith("waits: ")
    fewer = next_one(0.0, 4)
    assert isinstance(fewer, Intend)
    assert (fewer.nodes, fewer.offer.market) == (3, SPOT)
    late = next_one(21.9 * HOURS, 1, 2, 3, 4)
    assert isinstance(late, Intend)
    assert (late.nodes, late.offer.market) == (4, ON_DEMAND)
    without = next_one(21.9 * HOURS, 1, 2, 3, 4, over=(4,))
    assert isinstance(without, Intend), "four were not to be had on demand either"
    assert (without.nodes, without.offer.market) == (3, ON_DEMAND)


def test_what_a_loss_has_undone_is_to_be_done_again() -> None:
    """Nodes that vanish take with them what was not saved; while they live it counts as done."""
    progress = {"step": 500, "total_steps": 1000, "step_s": 12.0}
    lines: tuple[Line, ...] = (*launched(0.0, nodes=1), training(60.0), saved(1300.0, 100))
    lines = (*lines, ("progress", 6060.0, 1, progress))
    assert work_left_s(made(*lines), 1) == 500 * 12.0
    assert undone_s(made(*lines), 1) == 400 * 12.0
    lost = made(*lines, ended(6100.0, "node_lost", last_step=500))
    assert work_left_s(lost, 1) == 900 * 12.0
    kept = made(*lines, saved(6090.0, 500), ended(6100.0, "preempted", last_step=500))
    assert work_left_s(kept, 1) == 500 * 12.0
    again = (*launched(6200.0, 2, nodes=1), training(6300.0, 2, step=100))
    assert work_left_s(made(*lines, ended(6100.0, "node_lost"), *again), 1) == 900 * 12.0


def test_a_loss_without_a_word_must_leave_time_for_what_it_undoes() -> None:
    """With an hour between saves, spot is not bought an hour before nothing else could be."""
    progress = {"step": 100, "total_steps": 700, "step_s": 60.0}
    lines: tuple[Line, ...] = (*launched(0.0, nodes=2), training(600.0), saved(2000.0, 40))
    lines = (*lines, ("progress", 6599.0, 1, progress), saved(6599.0, 100))
    limits = Limits(nodes_min=2, nodes_max=2, deadline_at=6600.0 + 10 * HOURS + 235.0 + 3600.0)
    record = made(*lines, ended(6600.0, "preempted", last_step=100), limits=limits)
    assert advised(record, PLACES, 2, 6600.0, SLOW).offers == (PAID,)
    often = (*lines[:-1], *(saved(2000.0 + step, step) for step in range(41, 101)))
    record = made(*often, ended(6600.0, "preempted", last_step=100), limits=limits)
    assert advised(record, PLACES, 2, 6600.0, SLOW).offers[0].market is SPOT


def test_what_was_saved_for_an_end_is_no_usual_stretch() -> None:
    """Nor does an attempt count that resumed and took no step."""
    progress = {"step": 120, "total_steps": 700, "step_s": 60.0}
    lines: tuple[Line, ...] = (
        *launched(0.0, nodes=1),
        training(600.0),
        saved(4000.0, 60),
        saved(7600.0, 120),
    )
    lines = (
        *lines,
        ("progress", 7700.0, 1, progress),
        saved(7900.0, 125, checkpoint_kind="emergency"),
    )
    lines = (*lines, ended(8000.0, "preempted", last_step=125))
    assert undone_s(made(*lines), 1) == 3600.0
    again = (
        *launched(8100.0, 2, nodes=1),
        training(8200.0, 2, step=125),
        ended(8300.0, "vanished", 2),
    )
    assert undone_s(made(*lines, *again), 1) == 3600.0


def test_best_states_are_saves_like_others() -> None:
    """Where the metric gets better all the time, nothing else is saved."""
    best = [saved(1000.0 + step, step, checkpoint_kind="best") for step in range(10, 121, 10)]
    progress = {"step": 125, "total_steps": 700, "step_s": 60.0}
    lines = (*launched(0.0, nodes=1), training(600.0), *best, ("progress", 7700.0, 1, progress))
    assert undone_s(made(*lines), 1) == 600.0


def test_nodes_are_not_given_up_for_spot_that_the_next_launch_would_not_buy() -> None:
    """What a loss of spot nodes would undo counts when on-demand nodes are to be given up, too."""
    progress = {"step": 100, "total_steps": 400, "step_s": 60.0}
    lines: tuple[Line, ...] = (
        *launched(0.0, nodes=2),
        training(600.0),
        saved(3000.0, 40),
        saved(6590.0, 100),
    )
    lines = (*lines, ("progress", 6599.0, 1, progress))
    for slack_s, due in ((2400.0, False), (3600.0, False), (5400.0, True)):
        deadline_at = 7200.0 + 300 * 60.0 + 600.0 + 235.0 + slack_s
        limits = Limits(nodes_min=2, nodes_max=2, deadline_at=deadline_at)
        record = made(*lines, limits=limits)
        attempt = replace(record.attempts[0], offer=PAID)
        record = replace(record, attempts=(attempt,))
        assert back_to_spot_due(record, attempt, 7200.0, SLOW, free_spot=2) is due, slack_s


def test_nodes_that_have_lived_for_hours_are_as_old_as_that() -> None:
    """Who lives long is taken less often: its age is not that of its first sign of life."""
    hazard = pooled("H100", 8)
    lives = made(*launched(0.0), training(60.0))
    seen = seen_of(lives, FAKE_OFFER, 1, 10 * HOURS, hazard)
    assert (seen.up, seen.unseen_s) == (True, 0.0)
    assert seen.age_s == pytest.approx(10 * HOURS - 60.0)
    left = made(*launched(0.0), training(60.0), ended(10 * HOURS, "finished"))
    seen = seen_of(left, FAKE_OFFER, 1, 11 * HOURS, hazard)
    assert (seen.up, seen.unseen_s) == (True, HOURS)
    assert seen.age_s == pytest.approx(10 * HOURS - 60.0)
    seen = seen_of(lives, FAKE_OFFER, 1, 1000 * HOURS, hazard)
    assert seen.age_s == pytest.approx(1000 * HOURS - 60.0)
    taken = made(*launched(0.0), training(60.0), ended(10 * HOURS, "preempted"))
    seen = seen_of(taken, FAKE_OFFER, 1, 11 * HOURS, hazard)
    assert (seen.up, seen.age_s) == (False, 0.0)
