from __future__ import annotations

import pytest
import torch

from spotguard.errors import UsageError
from spotguard.runtime.scaling import LearningRateScale


class Training:
    """A weight whose gradient is always 1, so that it falls by the rate at each step."""

    def __init__(self, scale: LearningRateScale, rate: float | torch.Tensor = 1.0) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.weight.grad = torch.ones_like(self.weight)
        self.optimizer = torch.optim.SGD([self.weight], lr=rate)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.number = 0
        scale.attach([self.optimizer], lambda: self.number)

    def step(self) -> float:
        """Return by how much the weight fell."""
        before = self.weight.item()
        self.optimizer.step()
        self.number += 1
        return before - self.weight.item()


@pytest.mark.parametrize(("rule", "factor"), [("linear", 2.25), ("sqrt", 1.5)])
def test_the_rate_follows_the_ranks(rule: str, factor: float) -> None:
    """Nine ranks with a rate for four: in proportion, or by the root."""
    scale = LearningRateScale(rule, reference=4, warmup_steps=0)
    told = scale.begin(9, 0)
    assert Training(scale).step() == pytest.approx(factor)
    assert told == (f"learning rate times {factor} instead of 1, over 0 steps: 9 ranks, set for 4")


def test_the_reference_changes_nothing() -> None:
    """On as many ranks as the rate is for, there is nothing to say."""
    scale = LearningRateScale("linear", reference=4, warmup_steps=10)
    assert scale.begin(4, 0) is None
    assert Training(scale).step() == 1.0


def test_the_change_is_spread_over_the_warmup() -> None:
    """From the factor before to the new one, in equal steps, and then it stays."""
    scale = LearningRateScale("linear", reference=2, warmup_steps=4)
    scale.begin(6, 0)
    training = Training(scale)
    assert [training.step() for _ in range(6)] == pytest.approx([1, 1.5, 2, 2.5, 3, 3])


@pytest.mark.parametrize("rate", [1.0, torch.tensor(1.0, dtype=torch.float64)], ids=type)
def test_the_schedule_does_not_notice(rate: float | torch.Tensor) -> None:
    """Schedulers and checkpoints see the script's own rate; a factor never piles up."""
    scale = LearningRateScale("linear", reference=1, warmup_steps=0)
    scale.begin(3, 0)
    training = Training(scale, rate)
    for expected in (1.0, 0.5, 0.25):
        assert float(training.optimizer.state_dict()["param_groups"][0]["lr"]) == expected
        assert training.step() == pytest.approx(3 * expected)
        training.scheduler.step()


def test_a_resume_goes_on_with_the_warmup() -> None:
    """On as many ranks: at the same factor. On others: from the factor that was reached."""
    first = LearningRateScale("linear", reference=2, warmup_steps=4)
    first.begin(6, 10)
    state = first.state_dict()

    same = LearningRateScale("linear", reference=2, warmup_steps=4)
    same.load_state_dict(state)
    assert same.begin(6, 12) is None
    assert [same.factor(step) for step in (12, 13, 14, 20)] == [2, 2.5, 3, 3]

    fewer = LearningRateScale("linear", reference=2, warmup_steps=4)
    fewer.load_state_dict(state)
    assert fewer.begin(2, 12) is not None
    assert [fewer.factor(step) for step in (12, 13, 14, 16)] == [2, 1.75, 1.5, 1]


def test_nonsense_is_named() -> None:
    """Another rule, no ranks, a negative warm-up."""
    with pytest.raises(UsageError, match="lr_scaling is 'cubic'; allowed: linear, sqrt"):
        LearningRateScale("cubic", reference=1, warmup_steps=0)
    for reference, warmup_steps in ((0, 1), (1, -1)):
        with pytest.raises(UsageError, match="allowed: from 1, and from 0"):
            LearningRateScale("sqrt", reference=reference, warmup_steps=warmup_steps)
