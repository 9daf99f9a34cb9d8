"""What stands at the top of an epoch's body counts once, in however many attempts it comes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from spotguard.runtime.checkpoint.captured import Between
from spotguard.runtime.checkpoint.own_state import EPOCH_BEGUN, EpochBegun
from spotguard.runtime.loop.epoch_top import EpochTop
from spotguard.runtime.state.best import Best
from tests.runtime.harness.lab import adapters, same

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.checkpoint.manifest import Manifest
    from spotguard.runtime.checkpoint.training_state import Keeper


def _zeros_by_numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[:] = 0


class Script:
    """What a script tracks, and the lines at the top of its epochs."""

    def __init__(self, begun: EpochBegun | None = None, **options: Any) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD([self.model.weight], lr=1.0, momentum=0.5)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.optimizer.step()  # which schedules want to come after
        self.draws = torch.Generator().manual_seed(3)
        self.noise = torch.Generator().manual_seed(4)
        self.seen: dict[str, Any] = {"tops": 0, "steps": 0, "losses": []}
        self.told: list[str] = []
        self.keeper = SimpleNamespace(
            objects=adapters(self.tracked),
            at=Between(epoch_begun=begun),
            saver=SimpleNamespace(
                generators=SimpleNamespace(names=frozenset({"noise"})),
                parts=SimpleNamespace(names=frozenset()),
            ),
            weights_are_exchanged=False,
            best=Best(),
        )
        self.top = EpochTop(cast("Keeper", self.keeper), self.told.append, **options)

    @property
    def tracked(self) -> dict[str, Any]:
        """Return what `run.track` would be given."""
        names = "model", "optimizer", "schedule", "draws", "noise", "seen"
        return {name: getattr(self, name) for name in names}

    def lines(self) -> list[Any]:
        """Do what stands at the top; return what it makes for the rest of the epoch."""
        self.schedule.step()
        self.seen["tops"] += 1
        self.keeper.best.offer(self.seen["tops"], "max")
        drawn = torch.randperm(9, generator=self.draws), torch.rand(2, generator=self.noise)
        return [self.schedule.get_last_lr(), self.seen["tops"], *drawn, torch.rand(2)]

    def train(self) -> None:
        """Do some steps, which change the same things."""
        self.keeper.best.take()
        for _ in range(3):
            self.seen["steps"] += 1
            self.seen["losses"].append(float("nan"))
            self.optimizer.param_groups[0]["lr"] *= 0.9
            torch.rand(1, generator=self.draws)
            torch.rand(1, generator=self.noise)

    def state(self) -> list[Any]:
        """Return the small state as it is."""
        groups = self.optimizer.state_dict()["param_groups"]
        draws = self.draws.get_state(), self.noise.get_state()
        return [groups, self.schedule.state_dict(), *draws, json.dumps(self.seen)]

    def resumed(self, begun: EpochBegun | None, **options: Any) -> Script:
        """Return the script of the next attempt, which has this one's state."""
        other = Script(stored(begun), **options)
        other.optimizer.load_state_dict(self.optimizer.state_dict())
        other.schedule.load_state_dict(self.schedule.state_dict())
        other.draws.set_state(self.draws.get_state())
        other.noise.set_state(self.noise.get_state())
        other.seen.update(json.loads(json.dumps(self.seen)))
        other.keeper.best.now = other.keeper.best.at_boundary = self.keeper.best.now
        return other


def stored(begun: EpochBegun | None) -> EpochBegun | None:
    """Return it as it comes back from a checkpoint."""
    if begun is None:
        return None
    counters, own = json.loads(json.dumps([begun.counters(), begun.own]))
    manifest = SimpleNamespace(
        counters={EPOCH_BEGUN: counters}, ranks={"2": {EPOCH_BEGUN: own, "torch": "x"}}
    )
    return EpochBegun.of(cast("Manifest", manifest), 2)


@pytest.mark.parametrize("steps", [True, False])
def test_the_top_comes_again_to_what_it_found_and_changes_nothing(steps: bool) -> None:
    """So it is twice in a row, in the midst of the epoch and before its first step."""
    script = Script(with_random=True)
    script.top.begin(4)
    torch.manual_seed(1)
    script.top.begin(5)
    made = script.lines()
    begun = script.top.end()
    for _ in range(2):
        if steps:
            script.train()
        state, best = script.state(), script.keeper.best.now
        script = script.resumed(begun, with_random=True)
        torch.manual_seed(8)
        goes_on_with = torch.get_rng_state()
        script.top.begin(5)
        assert same(script.lines(), made)
        begun = script.top.end()
        assert same(script.state(), state)
        assert script.keeper.best.now == best
        assert torch.equal(torch.get_rng_state(), goes_on_with)
    assert script.told == []
    script.top.begin(6)
    script.lines()
    script.top.end()
    assert script.seen["tops"] == 2


@pytest.mark.parametrize("epoch", [None, 4])
def test_a_checkpoint_from_before_the_top_lets_it_count(epoch: int | None) -> None:
    """It is of no epoch whose body had begun, or of another one."""
    script = Script(None if epoch is None else EpochBegun(epoch, {}, {}))
    script.top.begin(5)
    script.lines()
    assert script.top.end() == script.top.end()
    assert script.seen["tops"] == 1
    assert script.schedule.last_epoch == 1


def test_a_checkpoint_holds_only_what_the_top_had_changed() -> None:
    """Most scripts do nothing there. What is each rank's own is not in what all share."""
    script = Script()
    script.top.begin(0)
    assert script.top.end() == EpochBegun(0, {}, {})
    script.top.begin(1)
    script.lines()
    begun = script.top.end()
    assert begun is not None
    assert set(begun.before) == {"schedule", "draws", "seen", "optimizer"}
    assert set(begun.own) == {"noise"}


def test_what_is_too_long_for_a_manifest_still_counts_once() -> None:
    """It is not there as it was before, but the second change of it is taken back."""
    script = Script()
    script.seen["losses"] = [0.5] * 100_000
    script.top.begin(0)
    script.lines()
    begun = script.top.end()
    assert begun is not None
    assert "seen" not in begun.before
    script = script.resumed(begun)
    script.top.begin(0)
    assert script.lines()[1] == 2
    script.top.end()
    assert script.seen["tops"] == 1


def test_what_is_large_is_let_be() -> None:
    """To copy a replay buffer at each epoch is too much; it is asked for its state once."""

    class Buffer:
        asked = 0

        def state_dict(self) -> dict[str, Any]:
            self.asked += 1
            return {"asked": self.asked, "frames": torch.zeros(2 << 20)}

        def load_state_dict(self, _: Any) -> None:
            raise AssertionError

    script, buffer = Script(), Buffer()
    script.keeper.objects.update(adapters({"buffer": buffer}))
    script.top = EpochTop(cast("Keeper", script.keeper), script.told.append)
    for epoch in range(3):
        script.top.begin(epoch)
        begun = script.top.end()
        assert begun == EpochBegun(epoch, {}, {})
    assert buffer.asked == 1


@pytest.mark.parametrize("guarded", [True, False])
def test_a_group_that_the_top_adds_is_there_once(guarded: bool) -> None:
    """A script thaws a layer at an epoch's top; it asks whether it has done so, or does not."""

    def thaw(script: Script) -> None:
        if not (guarded and script.model.bias.requires_grad and script.seen["tops"]):
            script.optimizer.add_param_group({"params": [script.model.bias], "lr": 0.1})

    first = Script()
    first.top.begin(0)
    thaw(first)
    begun = first.top.end()
    first.seen["tops"] = 1
    again = Script(stored(begun))
    again.seen["tops"] = 1
    again.optimizer.add_param_group({"params": [again.model.bias], "lr": 0.05})
    groups = again.optimizer.state_dict()["param_groups"]
    again.top.begin(0)
    assert len(again.optimizer.param_groups) == 1
    thaw(again)
    again.top.end()
    assert again.optimizer.state_dict()["param_groups"] == groups
    assert again.optimizer.param_groups[1]["params"][0] is again.model.bias


def test_a_rate_that_is_a_tensor_stays_the_one_that_kernels_know() -> None:
    """A captured graph reads it where it is."""
    script = Script()
    rate = torch.tensor(0.5)
    script.optimizer.param_groups[0]["lr"] = rate
    script.top.begin(0)
    rate.mul_(0.5)
    begun = script.top.end()
    script.keeper.at = Between(epoch_begun=stored(begun))
    script.top = EpochTop(cast("Keeper", script.keeper), script.told.append)
    script.top.begin(0)
    assert script.optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5
    rate.mul_(0.5)
    script.top.end()
    assert float(rate) == 0.25


@pytest.mark.parametrize(
    "nonsense",
    [
        3,
        {"epoch": "5", "before": {}},
        {"epoch": True},
        {"epoch": 5, "before": [1]},
        {"epoch": 5, "before": {"schedule": 3, "nobody": {}, "draws": {"tree": 1, "tensors": {}}}},
        {"epoch": 5, "before": {"optimizer": {"tree": [{"lr": 1}], "tensors": None}}},
        {"epoch": 5, "before": {"optimizer": {"tree": [3], "tensors": {}}}},
        {"epoch": 5, "before": {"seen": {"tree": {"$": "tensor", "name": "x"}, "tensors": {}}}},
    ],
)
def test_a_checkpoint_that_makes_no_sense_leaves_the_state_as_it_is(nonsense: Any) -> None:
    """What comes from a store may be anything."""
    manifest = SimpleNamespace(counters={EPOCH_BEGUN: nonsense}, ranks={"0": 3})
    script = Script(EpochBegun.of(cast("Manifest", manifest), 0))
    state = script.state()
    script.top.begin(5)
    script.optimizer.param_groups[0]["lr"] = 1.0
    script.top.end()
    assert same(script.state(), state)


def test_weights_that_the_top_changes_are_told_once() -> None:
    """They are not put back: they are too large."""
    script = Script()
    for epoch in range(3):
        script.keeper.weights_are_exchanged = epoch > 0
        script.top.begin(epoch)
        script.top.end()
        script.top.end()
    assert ["weights at the top of an epoch's body" in told for told in script.told] == [True]


def test_what_says_that_weights_were_changed_stays_with_them() -> None:
    """Flags of an optimizer are never put back, nor is anything but generators where it changed."""
    script = Script()
    group = script.optimizer.param_groups[0]
    group["train_mode"] = False
    script.top.begin(0)
    group["train_mode"], group["lr"] = True, 0.5
    begun = script.top.end()
    assert begun is not None
    again = Script(begun)
    again.optimizer.param_groups[0].update(train_mode=True, lr=0.5)
    again.top.begin(0)
    assert again.optimizer.param_groups[0]["train_mode"] is True
    assert again.optimizer.param_groups[0]["lr"] == 1.0
    script.top.begin(1)
    script.lines()
    script.keeper.weights_are_exchanged = True
    begun = script.top.end()
    assert begun is not None
    assert (set(begun.before), set(begun.own)) == ({"draws"}, {"noise"})
    assert len(script.told) == 1


@pytest.mark.parametrize(
    "write", [torch.nn.init.zeros_, lambda weight: weight.data.zero_(), _zeros_by_numpy]
)
def test_a_weight_that_nobody_watches_is_seen_to_change(
    write: Callable[[torch.Tensor], Any],
) -> None:
    """The witness looks at the first and the last one; a script may begin a middle one anew.

    Also by a write that torch does not count.
    """
    script = Script()
    script.top.begin(0)
    script.seen["reset_at"] = 0
    write(script.model.weight)
    assert script.top.end() == EpochBegun(0, {}, {})
    assert ["where it changes seen, too" in told for told in script.told] == [True]
    script.top.begin(1)
    script.seen["tops"] = 1
    begun = script.top.end()
    assert begun is not None
    assert set(begun.before) == {"seen"}


def test_an_optimizer_that_knows_it_has_moved_the_weights_is_not_told_of() -> None:
    """Its `train()` may be called again; a script that moves them besides is told."""
    script = Script()
    script.keeper.weights_are_exchanged = True
    group = script.optimizer.param_groups[0]
    group["train_mode"] = False
    script.top.begin(0)
    group["train_mode"] = True
    script.top.end()
    assert script.told == []
    script.top.begin(1)
    script.top.end()
    assert len(script.told) == 1


@pytest.mark.parametrize("aliased", ["at the top", "before it", "moments"])
def test_state_that_is_the_models_own_for_the_time_being_is_not_written_to(aliased: str) -> None:
    """The best weights are, until the first are copied. To put old ones there changed the model."""
    script = Script()
    moments = script.optimizer.state[script.model.weight]["momentum_buffer"] = torch.ones(2, 2)
    own = moments if aliased == "moments" else script.model.state_dict()["weight"]
    values = own.clone()
    old, kept = torch.full((2, 2), 3.0), torch.zeros(2, 2)
    best: dict[str, Any] = {"loss": 0.5, "weight": old.clone(), "kept": kept}
    script.keeper.objects.update(adapters({"best": best}))
    script.top = EpochTop(cast("Keeper", script.keeper), script.told.append)
    script.top.begin(0)
    best.update(loss=1.0, weight=own)
    kept.add_(1.0)
    begun = script.top.end()
    if aliased != "before it":
        best.update(loss=0.5, weight=old.clone())
    script.keeper.at = Between(epoch_begun=stored(begun))
    script.top = EpochTop(cast("Keeper", script.keeper), script.told.append)
    script.top.begin(0)
    assert torch.equal(best["weight"], old)
    assert torch.equal(own, values)
    assert best["kept"] is kept
    best.update(loss=1.0, weight=own)
    script.top.end()
    assert torch.equal(own, values)
    assert torch.equal(best["weight"], values if aliased == "before it" else old)
