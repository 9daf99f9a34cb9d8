from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotguard.errors import BudgetExhausted, SpecError
from spotguard.policy.plan.ladder import affordable_rungs, node_ladder
from spotguard.policy.plan.money import (
    budget_stop_at,
    check_budget,
    cost_usd,
    hours_bought,
    rate_usd_per_h,
    reserve_usd,
    saved_pct,
)

money = st.floats(0.01, 1e6)


def test_unknown_in_is_unknown_out() -> None:
    """A missing price is never free, and never makes anything look finished or cheap."""
    assert rate_usd_per_h(None, 4) is None
    assert cost_usd(None, 10) is None
    assert cost_usd(1, None) is None
    assert hours_bought(200, None) is None
    assert hours_bought(None, 2) is None
    assert reserve_usd(None, save_s=1, teardown_s=1) is None
    assert saved_pct(None, 10) is None
    assert saved_pct(10, None) is None
    assert saved_pct(10, 0) is None


@pytest.mark.parametrize("unknown", ["spent_usd", "budget_usd", "rate_usd_per_h", "reserve_usd"])
def test_no_stop_is_set_on_guesses(unknown: str) -> None:
    """When to stop is unknown as soon as one of its parts is."""
    known: dict[str, float | None] = {
        "spent_usd": 0.0,
        "budget_usd": 1.0,
        "rate_usd_per_h": 1.0,
        "reserve_usd": 0.0,
    }
    assert budget_stop_at(now=0.0, **known) == 3600.0
    known[unknown] = None
    assert budget_stop_at(now=0.0, **known) is None


@given(now=st.floats(0, 2e9), spent=money, budget=money, rate=money, wait_s=st.floats(0, 600))
def test_stopping_then_leaves_the_reserve(
    now: float, spent: float, budget: float, rate: float, wait_s: float
) -> None:
    """Stopping at the instant, then saving and leaving for the reserved time, ends on budget."""
    reserve = reserve_usd(rate, save_s=wait_s, teardown_s=10)
    at = budget_stop_at(
        now=now, spent_usd=spent, budget_usd=budget, rate_usd_per_h=rate, reserve_usd=reserve
    )
    assert at is not None
    total = spent + rate * (at - now + wait_s + 10) / 3600
    assert total == pytest.approx(budget, abs=rate * 1e-5)


def test_a_budget_already_spent_stops_in_the_past() -> None:
    """There is no 'stop in zero seconds' for money that is gone: the instant has passed."""
    at = budget_stop_at(
        now=100.0, spent_usd=2.0, budget_usd=1.0, rate_usd_per_h=3600.0, reserve_usd=0.0
    )
    assert at == 99.0
    assert hours_bought(-1, 5) == 0.0


def test_hours_and_savings() -> None:
    """$200 at $4 an hour lasts 50 hours; $0.918 for $3.06 saves 70 %; dearer is negative."""
    assert hours_bought(200, rate_usd_per_h(2, 2)) == 50.0
    assert saved_pct(0.918, 3.06) == pytest.approx(70.0)
    assert saved_pct(3, 2) == -50.0


def test_no_budget_passes_everything() -> None:
    """Without a budget nothing needs to be known."""
    check_budget(None, None)


def test_a_budget_refuses_an_unknown_price() -> None:
    """A budget that could not be kept is refused, unless the user says otherwise."""
    with pytest.raises(SpecError, match=r"budget: the price of a node is unknown, so \$200") as no:
        check_budget(200, None)
    assert "--allow-unknown-price" in no.value.hint
    assert no.value.exit_code == 2
    with pytest.raises(SpecError, match="what was spent so far is unknown"):
        check_budget(200, 1.0, spent_usd=None)
    check_budget(200, None, allow_unknown_price=True)


def test_a_budget_too_small_to_start_is_refused() -> None:
    """Money that cannot even pay for starting and saving is not spent at all; says the amounts."""
    with pytest.raises(BudgetExhausted) as caught:
        check_budget(1.0, 3.6, nodes=2, spent_usd=0.99, least_s=10)
    assert str(caught.value) == (
        "of the budget of $1.00, $0.0100 is left, "
        "but 2 nodes for 10 s, to start and save, cost $0.0200"
    )
    assert caught.value.hint == "raise it: --budget 1.03 or more"
    assert caught.value.exit_code == 20
    check_budget(1.03, 3.6, nodes=2, spent_usd=0.99, least_s=10)


@given(price=st.floats(1e-4, 1e3), nodes=st.integers(1, 64), spent=st.floats(0, 1e3))
def test_the_hint_is_never_too_small(price: float, nodes: int, spent: float) -> None:
    """Following the hint of a refused budget passes, also for the smallest amounts."""
    with pytest.raises(BudgetExhausted) as caught:
        check_budget(spent, price, nodes=nodes, spent_usd=spent)
    check_budget(float(caught.value.hint.split()[3]), price, nodes=nodes, spent_usd=spent)


def test_the_ladder_goes_down() -> None:
    """The most nodes first, then each smaller number down to the least."""
    assert node_ladder(1, 4) == (4, 3, 2, 1)
    assert node_ladder(2, 2) == (2,)
    for wrong in [(0, 1), (3, 2)]:
        with pytest.raises(ValueError, match="not a range of nodes"):
            node_ladder(*wrong)


def test_rungs_that_money_cannot_hold_are_left_out() -> None:
    """A cluster that could not run for long enough is not tried; smaller ones are."""
    ladder = (4, 3, 2, 1)
    left = {"price_usd_per_h": 3600.0, "left_usd": 25.0}
    assert affordable_rungs(ladder, **left, least_s=10) == (2, 1)
    assert affordable_rungs(ladder, **left, least_s=100) == ()
    assert affordable_rungs(ladder, price_usd_per_h=None, left_usd=1, least_s=9) == ladder
    assert affordable_rungs(ladder, price_usd_per_h=1, left_usd=None, least_s=9) == ladder
