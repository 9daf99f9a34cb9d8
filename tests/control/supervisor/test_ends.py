"""What the end of an attempt says of its save."""

from __future__ import annotations

import pytest

from spotguard.events.states import EndReason
from tests.control.made import Line, launched, made, said, saved, training


@pytest.mark.parametrize(
    ("lines", "is_saved"),
    [
        ([said(9, "terminated", step=6, saved=False)], False),  # nothing was ever saved
        ([said(9, "preempted", step=0, saved=False)], False),  # not even the beginning
        ([saved(5, 4), said(9, "budget", step=6, saved=False)], False),  # there is one, not this
        ([said(9, "terminated", step=6, saved=False), saved(9, 6)], True),  # a survivor saved it
        ([saved(8, 6), said(9, "terminated", step=6, saved=True)], True),
        ([saved(5, 4), said(9, "terminated", step=6)], False),  # of a job that did not say
        ([saved(8, 6), said(9, "terminated", step=6)], True),
        ([said(9, "terminated", step=0, saved=True)], None),  # nothing was done: nothing is claimed
        ([said(9, "budget", step=0)], None),
    ],
)
def test_an_end_says_what_became_of_its_own_save(lines: list[Line], is_saved: bool | None) -> None:
    """A checkpoint that exists says nothing; one of the very step that was reached does."""
    attempt = made(*launched(), training(), *lines).attempts[0]

    assert attempt.saved is is_saved
    for reason in (EndReason.PREEMPTED, EndReason.TERMINATED, EndReason.BUDGET, EndReason.STOPPED):
        words = reason.told(attempt.saved)
        promised = reason.label.partition(", ")[0]
        ways = {True: reason.label, False: f"{promised}, not saved in time", None: promised}
        assert words == ways[is_saved]


def test_what_is_not_known_is_not_claimed() -> None:
    """An attempt that never said a step promises nothing; labels without a promise stay."""
    attempt = made(*launched()).attempts[0]

    assert attempt.saved is None
    assert EndReason.BUDGET.told(None) == "budget reached"
    assert {EndReason.FAILED.told(saved) for saved in (True, False, None)} == {
        EndReason.FAILED.label
    }
