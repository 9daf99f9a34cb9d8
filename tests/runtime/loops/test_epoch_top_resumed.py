"""Whole jobs of three ranks whose epochs begin and end with what must count once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.runtime.harness.processes import digest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.runtime.harness.processes import Jobs

pytestmark = pytest.mark.e2e

SCRIPT = """
import hashlib, os, signal
import torch
import spotguard.runtime as spotguard

run = spotguard.init(save_every="2 steps", reseed=os.environ["RESEED"] == "yes")
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(26, 3), torch.randn(26, 1))
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
draws = torch.Generator().manual_seed(5)
noise = torch.Generator().manual_seed(100 + run.rank)
seen = {"tops": 0, "steps": 0, "ends": []}
run.track(model=model, optimizer=optimizer, schedule=schedule)
run.track(draws=draws, noise=noise, seen=seen)
if os.environ["RESEED"] == "yes" and run.rank == 0:
    torch.rand(5)  # a set-up may draw more on one rank, and as much as it likes
    torch.rand(int(os.environ["SPOTGUARD_ATTEMPT"]))

def moment(name):
    if name == os.environ.get("HURT"):
        if run.rank == run.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        while run._job.watch.agreed is None:
            signal.sigtimedwait([], 0.01)

for epoch in run.epochs(run.loader(data, global_batch_size=5, micro_batch_size=2), total=3):
    for _ in run.evaluate(range(2)):
        moment(f"early {epoch.number}")
    schedule.step()
    seen["tops"] += 1
    order = torch.randperm(6)
    other = torch.randperm(6, generator=draws)
    made = [float(torch.rand((), generator=noise)), *order.tolist(), *other.tolist()]
    print("made", epoch.number, schedule.get_last_lr(), seen["tops"], made, flush=True)
    moment(f"top {epoch.number}")
    for number, step in enumerate(epoch, epoch.done):
        for x, y in step:
            step.backward((model(x) * (1 + order[number]) - y - other[number]).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        seen["steps"] += int(order[number])
        if number == 2:
            schedule.step()
            torch.rand((), generator=draws)
        moment(f"step {step.number}")
    part = torch.randperm(26)[:4]
    for _ in run.evaluate(range(2)):
        moment(f"end {epoch.number}")
    seen["ends"].append([*part.tolist(), float((model(data[part][0]) - data[part][1]).norm())])
state = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
state += b"".join(g.get_state().numpy().tobytes() for g in (draws, noise))
print("digest", hashlib.sha256(state).hexdigest(), schedule.get_last_lr(), seen)
"""
MOMENTS = {
    "before the top": ("early 1",),
    "at the first gate": ("top 1",),
    "in the midst": ("step 9",),
    "in the end": ("end 1",),
    "again and again": ("top 1", "top 1", "step 7", "step 9", "end 1", "end 1", "early 2"),
}


@pytest.fixture
def script(jobs: Jobs) -> Path:
    """Return the script's path."""
    path = jobs.folder / "tops.py"
    path.write_text(SCRIPT)
    return path


def attempt(jobs: Jobs, script: Path, code: int, **env: Any) -> list[str]:
    """Run an attempt of three ranks; return what each said."""
    started = jobs.start_ranks(3, script=script, **{"SPOTGUARD_ATTEMPT": 1, **env})
    assert [rank.wait() for rank in started] == [code] * 3, [rank.said for rank in started]
    return [rank.said for rank in started]


def made(said: str) -> dict[str, str]:
    """Return what each epoch's top had made."""
    lines = [line.split(maxsplit=2) for line in said.splitlines() if line.startswith("made")]
    return {number: rest for _, number, rest in lines}


@pytest.mark.parametrize("reseed", ["yes", "no"])
@pytest.mark.parametrize("name", MOMENTS)
def test_top_and_end_of_an_epoch_count_once(
    jobs: Jobs, script: Path, name: str, reseed: str
) -> None:
    """Wherever it is interrupted, each rank ends as if nothing had happened."""
    calm = attempt(jobs, script, 0, RESEED=reseed, SPOTGUARD_RUN_ID="calm")
    if reseed == "yes":
        assert len({made(said)["1"].split("]", 1)[1].split(",", 1)[1] for said in calm}) == 1
    for number, hurt in enumerate((*MOMENTS[name], ""), 1):
        code = 75 if hurt else 0
        env = {"SPOTGUARD_ATTEMPT": number, "HURT": hurt, "RESEED": reseed}
        said = attempt(jobs, script, code, **env)
        for mine, theirs in zip(said, calm, strict=True):
            assert made(mine).items() <= made(theirs).items()
    assert [digest(each) for each in said] == [digest(each) for each in calm]


def test_weights_that_the_top_changes_are_told_once(jobs: Jobs, script: Path) -> None:
    """They would change once more after a resume; a script that changes none hears nothing."""
    calm = attempt(jobs, script, 0, RESEED="yes", SPOTGUARD_RUN_ID="calm")
    script.write_text(SCRIPT.replace('seen["tops"] += 1', "model.weight.data.mul_(0.5)"))
    said = attempt(jobs, script, 0, RESEED="yes")
    told = ["the script changes weights at the top" in each for each in (*calm, *said)]
    assert told == [False, False, False, True, False, False]
    assert said[0].count("changes weights at the top") == 1


def test_a_group_that_the_top_adds_is_added_again(jobs: Jobs, script: Path) -> None:
    """A script thaws a parameter as an epoch begins; a resume within it comes there again."""
    thaws = """
    if epoch.number == 1:
        model.bias.requires_grad_(True)
        optimizer.add_param_group({"params": [model.bias], "lr": 0.05})
    seen["tops"] += 1"""
    script.write_text(
        SCRIPT.replace('\n    seen["tops"] += 1', thaws)
        .replace("AdamW(model.parameters()", "AdamW([model.weight]")
        .replace("optimizer = ", "model.bias.requires_grad_(False)\noptimizer = ")
    )
    calm = attempt(jobs, script, 0, RESEED="yes", SPOTGUARD_RUN_ID="calm")
    for number, hurt in enumerate(("top 1", "step 8", "end 1", "step 13", ""), 1):
        env = {"SPOTGUARD_ATTEMPT": number, "HURT": hurt, "RESEED": "yes"}
        said = attempt(jobs, script, 75 if hurt else 0, **env)
    assert [digest(each) for each in said] == [digest(each) for each in calm]


SCHEDULE_FREE = """
class Free(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1, "k": 0, "train_mode": False})
    @torch.no_grad()
    def _move(self, train):
        for group in self.param_groups:
            if group["train_mode"] != train:
                group["train_mode"] = train
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 0.1 if train else 1 - 1 / 0.9)
    def train(self):
        self._move(True)
    def eval(self):
        self._move(False)
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["train_mode"]
            group["k"] += 1
            part, lr = 1 / group["k"], group["lr"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, part).add_(p.grad, alpha=lr * (0.9 * (1 - part) - 1))
                z.sub_(p.grad, alpha=lr)

optimizer = Free(model.parameters())
"""
MOVED = {
    "schedule-free": (
        ("optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)\n", SCHEDULE_FREE),
        ('\n    seen["tops"] += 1', '\n    optimizer.train()\n    seen["tops"] += 1'),
        ("    part = ", "    optimizer.eval()\n    part = "),
    ),
    "guarded": (
        (
            '\n    seen["tops"] += 1',
            '\n    if seen.get("reset_at") != epoch.number:'
            "\n        model.weight.data.mul_(0.5)"
            '\n        seen["reset_at"] = epoch.number'
            '\n    seen["tops"] += 1',
        ),
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_weights_that_the_script_knows_it_has_changed_are_changed_once(
    jobs: Jobs, script: Path, name: str
) -> None:
    """What tells it so is there as it was restored, in the first epoch and in a later one."""
    text = SCRIPT
    for old, new in MOVED[name]:
        assert text.count(old) == 1
        text = text.replace(old, new)
    script.write_text(text)
    calm = attempt(jobs, script, 0, RESEED="yes", SPOTGUARD_RUN_ID="calm")
    for number, hurt in enumerate(("step 2", "top 1", "step 8", "end 1", ""), 1):
        env = {"SPOTGUARD_ATTEMPT": number, "HURT": hurt, "RESEED": "yes"}
        said = attempt(jobs, script, 75 if hurt else 0, **env)
    assert [digest(each) for each in said] == [digest(each) for each in calm]
    told = ["the script changes weights at the top" in each for each in calm]
    assert told == [name == "guarded", False, False]
