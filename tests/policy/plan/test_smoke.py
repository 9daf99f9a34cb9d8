"""Whether an emergency save fits the notice: arithmetic on what a smoke measured."""

from __future__ import annotations

import pytest

from spotguard.policy.plan.smoke import Smoke, emergency_s, notice_s


@pytest.mark.parametrize(
    ("infra", "expected"),
    [
        ("aws", 120.0),
        ("aws/us-east-1,gcp", 30.0),
        ("azure", 30.0),
        ("slurm/lab/spot", None),
        ("kubernetes", None),
        ("local", None),
    ],
)
def test_the_shortest_notice_counts_and_none_is_unknown(infra: str, expected: float | None) -> None:
    """Where nobody promises a notice, nothing is refused for its sake."""
    assert notice_s(infra) == expected


def test_nodes_share_a_save() -> None:
    """Ranks write disjoint parts, so twice the nodes take half the time, beside the margin."""
    one = emergency_s(10_000_000_000, nodes=1, bytes_per_s=250e6)
    two = emergency_s(10_000_000_000, nodes=2, bytes_per_s=250e6)
    assert one == pytest.approx(49.0)
    assert two == pytest.approx(25.0)


def test_what_is_unknown_is_not_too_long() -> None:
    """Neither without a notice nor without an estimate."""
    smoke = Smoke(state_bytes=1, save_s=1.0, step_s=None, step_samples=2, first_step_s=None, at=0.0)
    assert smoke.fits
    assert Smoke(**{**smoke.__dict__, "emergency_s": 200.0}).fits
    assert not Smoke(**{**smoke.__dict__, "emergency_s": 30.1, "notice_s": 30.0}).fits
    assert Smoke(**{**smoke.__dict__, "emergency_s": 30.0, "notice_s": 30.0}).fits
