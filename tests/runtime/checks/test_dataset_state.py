"""What a script changes in its dataset as it trains, and what reading a sample changes there."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from spotguard.runtime.checks.dataset_state import DatasetSettings, SampleReading
from spotguard.runtime.checks.walker import Walker

if TYPE_CHECKING:
    from pathlib import Path

    from tests.runtime.harness.processes import Jobs

SCRIPT = """
import json, os, random, signal
import numpy as np
import torch
import spotguard.runtime as spotguard

WHAT, HURT = os.environ["WHAT"], int(os.environ.get("HURT", "-1"))

class Noise:
    def __init__(self):
        self.rng = np.random.default_rng(1)
        self.strength = 100
    def __call__(self, x):
        return x + int(self.rng.integers(self.strength))

class Data(torch.utils.data.Dataset):
    def __init__(self):
        self.mosaic, self.epoch, self.level, self.transform = True, 0, 0, Noise()
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __len__(self):
        return 12
    def __getitem__(self, index):
        made = self.transform(index * 1000) if WHAT == "epochs" else index * 1000
        return made + 100_000 * self.mosaic + 1_000_000 * self.epoch + 100_000_000 * self.level

jitter = random.Random(3)
def collate(samples):
    return [sample + (jitter.randrange(100) if WHAT == "epochs" else 0) for sample in samples]

run = spotguard.init(save_every="2 steps")
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
run.track(model=model, optimizer=optimizer)
data = Data()
workers = int(os.environ["WORKERS"])
more = {"prefetch_factor": 4} if workers else {}
loader = run.loader(data, global_batch_size=4, micro_batch_size=1, collate_fn=collate,
                    num_workers=workers, **more)

def train(step):
    samples = []
    for batch in step:
        samples += batch
        step.backward(model(torch.tensor([batch[0] / 1e9])).sum())
    optimizer.step()
    optimizer.zero_grad()
    print("read", json.dumps([step.number, samples]), flush=True)
    if step.number == HURT:
        if run.rank == run.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        while run._job.watch.agreed is None:
            signal.sigtimedwait([], 0.01)

if WHAT == "steps":
    for step in run.steps(loader, epochs=4):
        if step.number == 5:
            data.mosaic = False
        data.level = step.number // 4
        train(step)
else:
    for epoch in run.epochs(loader, total=4):
        if epoch.number == 1:
            data.mosaic = False
        data.set_epoch(epoch.number)
        data.level += 1
        for step in epoch:
            train(step)
"""


def attempt(jobs: Jobs, script: Path, world: int, code: int, **env: Any) -> dict[int, list[int]]:
    """Run an attempt; return what all ranks trained on in each step."""
    ranks = jobs.start_ranks(world, script=script, **env)
    assert [rank.wait() for rank in ranks] == [code] * world, [rank.said for rank in ranks]
    steps: dict[int, list[int]] = {}
    for rank in ranks:
        assert "WARNING" not in rank.said, rank.said
        for line in rank.said.splitlines():
            if line.startswith("read "):
                step, samples = json.loads(line.removeprefix("read "))
                steps[step] = sorted([*steps.get(step, []), *samples])
    return steps


@pytest.mark.e2e
@pytest.mark.parametrize("what", ["epochs", "steps"])
def test_a_dataset_that_the_loop_changes_is_the_same_in_workers_and_after_a_resume(
    jobs: Jobs, what: str
) -> None:
    """Every step has the samples of an undisturbed run without workers.

    With a worker that reads ahead over the ends of epochs, on 3 ranks and on 1, resumed within an
    epoch whose top has set something, and after it. Transforms draw from generators of their own.
    """
    script = jobs.folder / "job.py"
    script.write_text(SCRIPT)
    calm = attempt(jobs, script, 1, 0, WHAT=what, WORKERS=0, SPOTGUARD_RUN_ID="calm")
    assert len(calm) == 12
    of = {"WHAT": what, "WORKERS": 1}
    found = attempt(jobs, script, 3, 75, **of, HURT=4, SPOTGUARD_ATTEMPT=1)
    found |= attempt(jobs, script, 1, 0, **of, SPOTGUARD_ATTEMPT=2)
    assert found == calm


class Sample:
    """A dataset that holds whatever it is given."""

    count: int

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def read(self) -> None:
        """Change all that it holds, as a careless `__getitem__` would."""
        self.count += 1
        self.last = self.count * 7

    def draw(self) -> list[float]:
        """Draw from the generators."""
        return [self.np.random(), self.py.random(), float(torch.rand((), generator=self.th))]  # type: ignore[attr-defined]


def test_own_generators_follow_the_place_of_a_micro_batch() -> None:
    """Whatever was read before, in whichever process: the same draws; each has its own."""
    generators = {
        "np": np.random.default_rng(1),
        "py": random.Random(1),
        "th": torch.Generator().manual_seed(1),
    }
    data = Sample(**generators)
    reading = SampleReading([("dataset", data)], reseeds=True, watches=True)
    drawn: dict[int, Any] = {}
    for seed in (3, 4, 3, 5, 4):
        reading.begin(seed)
        drawn.setdefault(seed, []).append(data.draw())
        reading.end(None)
    assert drawn[3][0] == drawn[3][1] != drawn[4][0] == drawn[4][1]
    assert len({round(each, 9) for each in drawn[3][0]}) == 3

    of_the_script = SampleReading(
        [("dataset", data)], reseeds=True, leaves_alone=map(id, generators.values())
    )
    for each in (3, 3):
        of_the_script.begin(each)
        drawn.setdefault(-1, []).append(data.draw())
    assert drawn[-1][0] != drawn[-1][1]


def test_what_reading_changes_is_told_once() -> None:
    """A count is carried from sample to sample; what is overwritten before it is read is not."""
    data = Sample(count=0, last=0, recent=[])
    told: list[str] = []
    reading = SampleReading([("dataset", data)], reseeds=True, watches=True)
    for seed in range(6):
        reading.begin(seed)
        data.read()
        reading.end(told.append)
    [sentence] = told
    assert "dataset.count changes as samples are read" in sentence
    assert "last" not in sentence


def test_settings_are_stored_if_the_loop_has_changed_them() -> None:
    """Plain values, nested ones too; no secret, no NaN, nothing that is as it was set up."""
    data = Sample(mosaic=True, rate=0.5, token="t0", parts=[SimpleNamespace(p=1)], big=np.zeros(3))
    settings = DatasetSettings([("dataset", data)])
    assert settings.changes() == {}
    data.mosaic, data.token, data.parts[0].p = False, "t1", 2  # type: ignore[attr-defined]
    settings.take()
    data.rate = float("nan")  # type: ignore[attr-defined]
    stored = settings.changes()
    assert stored == {"dataset.mosaic": False, "dataset.parts[0].p": 2}
    assert settings.changes(halfway=True) == stored

    anew = Sample(mosaic=True, rate=0.5, token="t0", parts=[SimpleNamespace(p=1)], big=np.zeros(3))
    others = DatasetSettings([("dataset", anew)])
    others.restore({**stored, "dataset.gone": 1})
    assert (anew.mosaic, anew.parts[0].p, anew.rate) == (False, 2, 0.5)  # type: ignore[attr-defined]
    others.restore({})
    assert (anew.mosaic, anew.parts[0].p) == (True, 1)  # type: ignore[attr-defined]


def test_generators_among_globals_come_in_one_order() -> None:
    """Their places in it seed them: in the order of a set, each process would seed them its way."""
    names = [f"generator_{letter}" for letter in "qazwsxedcrfv"]
    scope: dict[str, Any] = {name: random.Random(1) for name in names}
    exec(f"def sample(index):\n    return [g.random() for g in ({', '.join(names)})]", scope)
    found = Walker(follows_globals=True).walk([("sample", scope["sample"])])
    assert list(found) == sorted(names)
