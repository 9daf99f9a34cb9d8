"""What stands around a backward pass that a framework runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spotguard.runtime.data.loader import Share
from spotguard.runtime.process.device_number import number_of
from spotguard.runtime.step import Step

_SHARE = Share(step=0, number=0, weight=1.0, indices=(0,), last=True)


class Witness:
    """Stands in for gradients and optimizers of three ranks, and writes down what they are told."""

    def __init__(self, *, late_wrapper: bool = False) -> None:
        self.told: list[str] = []
        self._late_wrapper = late_wrapper

    @property
    def expected_gradients(self) -> Any:
        """Return itself: a generator would be left by the garbage collector, whatever is broken."""
        return self

    def __enter__(self) -> None:
        self.told.append("expected")

    def __exit__(self, *_: object) -> None:
        self.told.append("no more expected")

    def begin(self, _: Share) -> None:
        """Do nothing."""

    def begin_backward(self, weight: float) -> float:
        """Ask for three times the loss, as if it were divided by three ranks later."""
        self.told.append("begun")
        if self._late_wrapper:
            raise ValueError("a module was wrapped too late")
        return 3.0 * weight

    def end_backward(self, _: Share) -> None:
        """Write it down."""
        self.told.append("ranks met")

    def gradients_are_there(self) -> None:
        """Write it down."""
        self.told.append("gradients are there")


def at_its_batch(witness: Witness) -> Step:
    """Return a step whose only micro-batch was handed out."""
    loop: Any = SimpleNamespace(
        loader=SimpleNamespace(undivided=False, seed_training=lambda *_: None),
        batches=iter([(_SHARE, "batch")]),
        gradients=witness,
        optimizers=witness,
        job=SimpleNamespace(gate=SimpleNamespace(enter=lambda _: True)),
        trained_once=lambda _: None,
        ended=lambda _: witness.told.append("step ended"),
    )
    step = Step(loop, 0, 0)
    assert next(iter(step)) == "batch"
    return step


def test_the_ranks_meet_after_the_frameworks_pass() -> None:
    """The loss comes as it is to go backward; then all that follows the last one, in this order."""
    witness = Witness()
    with at_its_batch(witness).weighted(torch.tensor(2.0)) as loss:
        assert float(loss) == 6.0
        witness.told.append("backward")
    passes = ["expected", "begun", "backward", "ranks met", "no more expected"]
    assert witness.told == [*passes, "gradients are there", "step ended"]


def test_a_pass_that_fails_is_not_waited_for() -> None:
    """The others would hang in a collective of which this rank has nothing to bring."""
    witness = Witness()
    with pytest.raises(MemoryError), at_its_batch(witness).weighted(torch.tensor(2.0)):
        raise MemoryError
    assert witness.told == ["expected", "begun", "no more expected"]


def test_what_is_refused_before_the_pass_leaves_nothing_expected() -> None:
    """Else a gradient from elsewhere would be taken for one of the step's."""
    witness = Witness(late_wrapper=True)
    with pytest.raises(ValueError, match="too late"):
        at_its_batch(witness).weighted(torch.tensor(2.0)).__enter__()
    assert witness.told == ["expected", "begun", "no more expected"]


def test_a_loss_that_its_device_gives_no_more_is_none() -> None:
    """A heartbeat is made of it, by the thread that has to tell the failed GPU's end."""
    for device, told in (("cpu", 2.0), ("meta", None)):  # the latter has no values, either
        step = at_its_batch(Witness())
        step._pass.losses.append((_SHARE, torch.full((), 2.0, device=device), 1.0))
        assert number_of(lambda step=step: step.own_loss) == told  # type: ignore[misc]
