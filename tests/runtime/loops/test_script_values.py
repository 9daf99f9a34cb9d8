"""What a script sets up otherwise than its checkpoint: told by name, or taken up if asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim import lr_scheduler

from spotguard.errors import UsageError
from spotguard.runtime.loop.script_values import ScriptValues, climbing_again
from spotguard.runtime.state.tracked import Box, tracked, tracked_slot
from spotguard.testing import FakeRendezvous
from tests.checkpoint.crashes.savings import make_manifest
from tests.runtime.harness.lab import same

if TYPE_CHECKING:
    from spotguard.runtime.loop.script_values import SetUpDifference
    from tests.runtime.harness.processes import Jobs

DONE = 7


def cosine(optimizer: torch.optim.Optimizer, x: float) -> Any:
    """Return a schedule of 20 times `x` steps."""
    return lr_scheduler.CosineAnnealingLR(optimizer, T_max=int(20 * x))


def sequential(optimizer: torch.optim.Optimizer, x: float) -> Any:
    """Return a warm-up, followed by a decay."""
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), cosine(optimizer, x)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[int(3 * x)])


SCHEDULES: dict[str, Any] = {
    "cosine": cosine,
    "steps": lambda o, x: lr_scheduler.MultiStepLR(o, [int(2 * x), int(5 * x)], 0.3),
    "exponential": lambda o, x: lr_scheduler.ExponentialLR(o, 1 - 0.1 * x),
    "function": lambda o, x: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n * x)),
    "factors": lambda o, x: lr_scheduler.MultiplicativeLR(o, lambda n: 0.9),
    "one cycle": lambda o, x: lr_scheduler.OneCycleLR(o, 0.1 * x, total_steps=int(30 * x)),
    "sequential": sequential,
}


class Script:
    """The objects of a script with three groups, one of them without decay."""

    def __init__(self, schedule: Any, *, lr: float = 0.1, decay: float = 0.1, x: float = 1) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
        groups: list[dict[str, Any]] = [{"params": each.parameters()} for each in self.model]
        groups[2]["weight_decay"] = 0.0
        self.optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=decay)
        self.schedule = None if schedule is None else schedule(self.optimizer, x)
        self.values: Any = None
        self.seen: dict[str, Any] = {"best": 1e9 * x, "history": [], "of": {"count": 0}}
        self.box = Box(int(x))
        objects = {"model": self.model, "optimizer": self.optimizer, "seen": self.seen}
        objects |= {"box": self.box} | ({} if schedule is None else {"schedule": self.schedule})
        self.objects = {name: tracked(name, value) for name, value in objects.items()}

    def train(self, steps: int) -> list[Any]:
        """Do some steps; return each rate of each group."""
        rates = []
        for _ in range(steps):
            self.model(torch.ones(1, 2)).sum().backward()
            self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()
            rates.append([group["lr"] for group in self.optimizer.param_groups])
        return rates

    def state(self) -> Any:
        """Return what a checkpoint would hold of the optimizer and its schedule."""
        state = self.optimizer.state_dict()
        return state, None if self.schedule is None else self.schedule.state_dict()


def checkpoint_of(values: ScriptValues, step: int = DONE) -> Any:
    """Return a manifest that keeps these values."""
    return make_manifest(step, counters={"set_up": values.in_effect, "total_steps": 20})


def go_on(
    before: Script, values: ScriptValues, after: Script, *, count: bool
) -> SetUpDifference | None:
    """Restore `after` from what `before` has come to; return what there is to tell."""
    mine = ScriptValues(after.objects, count=count)
    optimizer, schedule = before.state()
    after.optimizer.load_state_dict(optimizer)
    if after.schedule is not None:
        after.schedule.load_state_dict(schedule)
    after.seen.update(before.seen)
    after.box.value = before.box.value
    found = mine.apply(checkpoint_of(values))
    after.values = mine
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_new_values_are_told_and_the_checkpoints_count(name: str) -> None:
    """By group, key, old and new value; nothing is changed, and it is told at each resume."""
    before = Script(SCHEDULES[name])
    values = ScriptValues(before.objects, count=False)
    before.train(DONE)
    after = Script(SCHEDULES[name], lr=0.01, decay=0.2, x=2)
    found = go_on(before, values, after, count=False)
    assert found is not None
    assert not found.counts
    assert "the checkpoint's count" in found.message
    assert "optimizer group 0 weight_decay 0.1 → 0.2" in found.message
    assert "group 2 weight_decay" not in found.message
    assert "seen best 1e+09 → 2e+09" in found.message
    assert "box value 1 → 2" in found.message
    assert "optimizer lr 0.1 → 0.01" in found.message or name == "one cycle", found.message
    third = Script(SCHEDULES[name], lr=0.01, decay=0.2, x=2)
    again = go_on(after, after.values, third, count=False)
    if name == "function":  # which is in no checkpoint, so that the script's counts
        assert "schedule function at steps" in found.message
        assert again is not None
        assert "function" not in again.message
    else:
        assert again == found
        assert after.train(5) == before.train(5)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_scripts_values_count_if_asked_for(name: str) -> None:
    """Rates are those of a run that had the new values from its first step on; moments stay. Once
    taken up they are the checkpoint's, and nothing is told any more."""
    before = Script(SCHEDULES[name])
    values = ScriptValues(before.objects, count=False)
    before.train(DONE)
    before.seen["of"]["count"] = 5
    always = Script(SCHEDULES[name], lr=0.01, decay=0.2, x=2)
    always.train(DONE)
    after = Script(SCHEDULES[name], lr=0.01, decay=0.2, x=2)
    found = go_on(before, values, after, count=True)
    assert found is not None
    assert found.counts
    moments = [script.optimizer.state_dict()["state"] for script in (after, before)]
    assert same(*moments)
    assert [g["weight_decay"] for g in after.optimizer.param_groups] == [0.2, 0.2, 0.0]
    assert after.seen["best"] == 2e9
    assert after.seen["of"] == {"count": 5}, "what the script sets up as before stays"
    assert after.box.value == 2
    assert after.train(5) == always.train(5)
    third = Script(SCHEDULES[name], lr=0.01, decay=0.2, x=2)
    assert go_on(after, after.values, third, count=True) is None
    assert third.train(3) == always.train(3)


@pytest.mark.parametrize("count", [False, True])
def test_a_script_that_is_the_same_is_told_nothing(count: bool) -> None:
    """However far schedule and counters have come."""
    before = Script(sequential)
    values = ScriptValues(before.objects, count=False)
    before.train(DONE)
    before.optimizer.param_groups[1]["weight_decay"] = 0.7  # the loop's own
    after = Script(sequential)
    assert go_on(before, values, after, count=count) is None
    assert after.optimizer.param_groups[1]["weight_decay"] == 0.7
    assert after.train(5) == before.train(5)


def test_a_plateau_keeps_what_it_has_lowered_but_takes_its_own_settings() -> None:
    """Its rate follows metrics of old, which nobody can count anew."""
    before = Script(lambda o, x: lr_scheduler.ReduceLROnPlateau(o, patience=int(3 * x)))
    values = ScriptValues(before.objects, count=False)
    assert before.schedule is not None
    before.schedule.num_bad_epochs = 2
    for group in before.optimizer.param_groups:
        group["lr"] = 0.05
    after = Script(lambda o, x: lr_scheduler.ReduceLROnPlateau(o, patience=int(3 * x)), x=2)
    found = go_on(before, values, after, count=True)
    assert found is not None
    assert "schedule patience 3 → 6" in found.message
    assert after.schedule is not None
    assert (after.schedule.patience, after.schedule.num_bad_epochs) == (6, 2)
    assert after.optimizer.param_groups[0]["lr"] == 0.05


def test_another_class_is_refused_or_counted_anew() -> None:
    """A schedule's state in another one's class would be junk; asked for, the new one begins."""
    before = Script(SCHEDULES["steps"])
    values = ScriptValues(before.objects, count=False)
    after = Script(cosine)
    with pytest.raises(UsageError, match="was a MultiStepLR in the checkpoint at step 7") as no:
        ScriptValues(after.objects, count=False).refuse_other_classes(checkpoint_of(values))
    assert 'hyperparameters="script"' in no.value.hint
    ScriptValues(after.objects, count=True).refuse_other_classes(checkpoint_of(values))
    other = {"optimizer": tracked("optimizer", torch.optim.SGD(after.model.parameters(), lr=1))}
    with pytest.raises(UsageError, match="optimizer was a AdamW"):
        ScriptValues(other, count=True).refuse_other_classes(checkpoint_of(values))


def test_ranks_that_set_up_other_rates_are_refused() -> None:
    """Of three ranks one has another decay: only the first one's would be saved."""
    words = FakeRendezvous()
    for rank, decay in enumerate((0.1, 0.1)):
        ScriptValues(Script(cosine, decay=decay).objects, count=False).check_ranks(
            words.rank(rank), rank
        )
    odd = ScriptValues(Script(cosine, decay=0.3).objects, count=False)
    with pytest.raises(UsageError, match=r"rank 2 sets up optimizer with weight_decay"):
        odd.check_ranks(words.rank(2), 2)


def test_a_longer_run_is_told_that_its_cosine_climbs_again() -> None:
    """Only where it was made longer, and the schedule was not."""
    script = Script(cosine)
    script.train(DONE)
    assert "T_max 20" in climbing_again(script.objects, DONE, 20, 40)
    assert not climbing_again(script.objects, DONE, 20, 20)
    assert not climbing_again(Script(cosine, x=2).objects, DONE, 20, 40)


def test_slots_and_values_of_ranks_are_taken_up() -> None:
    """Attributes that `track_values` names, too."""

    class Holder:
        margin = 1

    first, second = Holder(), Holder()
    second.margin = 3
    values = ScriptValues({"margin": tracked_slot(first, "margin")}, count=False)
    mine = ScriptValues({"margin": tracked_slot(second, "margin")}, count=True)
    second.margin = 1
    found = mine.apply(checkpoint_of(values))
    assert found is not None
    assert found.message.endswith("margin 1 → 3")
    assert second.margin == 3


SCRIPT = """
import os, torch
import spotguard.runtime as spotguard

run = spotguard.init(backend="gloo", hyperparameters=os.environ.get("COUNT"))
data = torch.utils.data.TensorDataset(torch.randn(12, 3), torch.randn(12, 1))
model = torch.nn.Linear(3, 1)
total = int(os.environ["TOTAL"])
optimizer = torch.optim.SGD(model.parameters(), lr=float(os.environ["LR"]))
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(os.environ["T_MAX"]))
run.track(model=model, optimizer=optimizer, schedule=schedule)
for step in run.steps(run.loader(data, global_batch_size=6, micro_batch_size=2), total=total):
    for x, y in step:
        step.backward((model(x) - y).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    print("rate", step.number, round(schedule.get_last_lr()[0], 6), flush=True)
"""


@pytest.mark.e2e
def test_a_run_is_trained_longer(jobs: Jobs) -> None:
    """A finished run of 4 steps goes on to 8: first as it was, and told; then with the new rates,
    as if it had them from the beginning; all of it in the history."""
    script = jobs.folder / "script.py"
    script.write_text(SCRIPT)
    jobs.run(script, SPOTGUARD_ATTEMPT=1, TOTAL=4, T_MAX=4, LR=0.1)
    said = jobs.run(script, SPOTGUARD_ATTEMPT=2, TOTAL=6, T_MAX=8, LR=0.2)
    assert "optimizer lr 0.1 → 0.2" in said
    assert "schedule T_max 4 → 8" in said
    assert "after it the rate climbs again" in said
    assert "rate 5 0.05" in said, "as the checkpoint says"
    said = jobs.run(script, SPOTGUARD_ATTEMPT=3, TOTAL=8, T_MAX=8, LR=0.2, COUNT="script")
    assert "which count now: optimizer lr 0.1 → 0.2" in said
    assert "climbs again" not in said
    assert "rate 6 0.007612" in said
    assert "rate 7 0.0" in said
    kinds = [e.kind for e in jobs.events() if "differences" in e.data]
    assert kinds == ["warning", "hyperparameters"]
