from __future__ import annotations

from dataclasses import asdict, replace

from spotguard.control.journal import cost
from spotguard.control.journal.nodes.controller_node import ControllerNode
from spotguard.control.journal.record import Allotment, Limits
from spotguard.control.supervisor.attempt_limits import CONTROLLER_LEAVES_S, allot, beside_s
from spotguard.control.supervisor.policy import Policy
from tests.control.made import Line, launched, made

HOUR = 3600.0


def node(since: float, *, until: float | None = None, price: float | None = 0.5) -> Line:
    """A node for the controller."""
    known = ControllerNode(
        number=1, cluster="c", place="aws", price_usd_per_h=price, since=since, until=until
    )
    return ("controller_node", since, None, asdict(known))


def test_the_bill_has_the_controllers_node_from_its_request_until_it_is_gone() -> None:
    """While it lives its price is in the rate; an unknown one makes the whole unknown."""
    attempts = launched(0.0, price=1.0, nodes=1)
    record = made(*attempts, node(0.0), limits=Limits(budget_usd=10.0))
    assert cost.spent_usd(record, 2 * HOUR) == 3.0
    assert cost.known_spent_usd(record, 2 * HOUR) == 3.0
    assert cost.rate_usd_per_h(record) == 1.5
    gone = made(*attempts, node(0.0), node(0.0, until=HOUR))
    assert cost.spent_usd(gone, 2 * HOUR) == 2.5
    assert cost.rate_usd_per_h(gone) == 1.0
    rest = ("settled", HOUR, None, {"state": "stopped", "detail": "", "exit_code": 75})
    left = made(*attempts, node(0.0, until=2 * HOUR), rest)
    assert cost.spent_usd(left, HOUR) == 2.0, "it goes only after the run came to rest"
    assert cost.known_spent_usd(left, HOUR) == 2.0
    unknown = made(*attempts, node(0.0, price=None))
    assert cost.spent_usd(unknown, HOUR) is None
    assert cost.rate_usd_per_h(unknown) is None


def test_a_budget_pays_the_node_until_long_after_the_attempt() -> None:
    """What an attempt may spend leaves out its controller's price, and its node's last minutes."""
    record = made(node(0.0), limits=Limits(budget_usd=3.0))
    policy = Policy()
    got = allot(record, nodes=1, price_usd_per_h=1.0, now=0.0, policy=policy)
    assert isinstance(got, Allotment)
    assert got.down_at is not None
    end = got.down_at + policy.teardown_s
    spent = 1.0 * end / HOUR + 0.5 * (end + CONTROLLER_LEAVES_S) / HOUR
    assert abs(spent - 3.0) < 1e-6


def test_an_attempt_under_way_ends_earlier_for_a_node_that_came_later() -> None:
    """It was given all the money that was left then; of one that was counted it is given none."""
    later = made(*launched(0.0, price=1.0, nodes=1), node(HOUR))
    [attempt] = later.attempts
    paid = 0.5 * HOUR + 0.5 * CONTROLLER_LEAVES_S
    assert abs(beside_s(later, attempt, 2 * HOUR, Policy()) - paid) < 1e-6
    before = replace(later, controller_nodes=(replace(later.controller_nodes[0], since=-1.0),))
    assert beside_s(before, attempt, 2 * HOUR, Policy()) == 0.0
    replaced = replace(
        before,
        controller_nodes=(
            replace(before.controller_nodes[0], until=HOUR),
            replace(before.controller_nodes[0], number=2, since=HOUR),
        ),
    )
    early_s = beside_s(replaced, attempt, 2 * HOUR, Policy())
    assert early_s == 0.0, "its money pays the one in its place"
