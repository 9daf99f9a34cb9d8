"""`doctor SCRIPT`: what is measured of a loader becomes advice with the gain to expect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spotguard.control.drill.loader_trial import (
    LoaderReport,
    expected_step_s,
    report_of,
    try_loader,
)
from spotguard.errors import SmokeFailed
from spotguard.events.untrusted import Refused
from spotguard.spec.sources import resolve

SLOW = """
import time
import torch
import spotguard.runtime as spotguard

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.ones(4)

run = spotguard.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader(Data(), global_batch_size=8), total=500):
    for x in step:
        step.backward(model(x).mean())
    optimizer.step()
    optimizer.zero_grad()
"""


def measured(*rates: tuple[int, float | None], **more: Any) -> bytes:
    """Return what a job writes down: steps of 1 s for 64 samples, of which 0.6 s wait for data."""
    plain: dict[str, Any] = {
        "steps": 9,
        "step_s": 1.0,
        "data_s": 0.6,
        "reading": {"num_workers": 0, "pin_memory": None},
        "global_batch_size": 64,
        "micro_batch_size": 16,
        "cores": 8,
        "tried": [
            {"num_workers": count, "samples_per_s": rate, "first_s": 0.1} for count, rate in rates
        ],
    }
    return json.dumps({**plain, **more}).encode()


def changes(raw: bytes, *, has_gpus: bool = False) -> list[str]:
    """Return what is to be changed."""
    return [each.change for each in report_of(raw, has_gpus=has_gpus).advice]


def test_the_fewest_workers_that_are_as_good_are_advised_with_their_gain() -> None:
    """Two read 64 samples within the 0.4 s of computing; eight bring nothing more."""
    report = report_of(measured((0, 107.0), (1, 100.0), (2, 200.0), (8, 900.0)), has_gpus=False)
    [advice] = report.advice
    assert advice.change == "num_workers=2 in run.loader, instead of 0"
    assert "1 s becomes one of about 0.4 s here (60 % less)" in advice.gain
    assert [expected_step_s(report, each) for each in report.tried] == [
        pytest.approx(0.4 + 64 / 107),
        0.64,
        0.4,
        0.4,
    ]


@pytest.mark.parametrize(
    ("reading", "rates", "more", "says"),
    [
        (0, [(0, 107.0), (2, 105.0)], {}, ["num_workers=2"]),
        (2, [(0, 100.0), (2, 100.0), (4, 101.0)], {}, ["make samples cheaper"]),
        (2, [(0, 100.0), (1, 900.0), (2, 900.0)], {}, ["more cores"]),
        (2, [(0, 100.0), (1, 100.0), (2, 900.0)], {"data_s": 0.01}, []),
        (0, [(0, None), (2, None)], {}, ["make samples cheaper"]),
        (None, [], {}, ["a stream"]),
    ],
)
def test_other_advice(
    reading: int | None,
    rates: list[tuple[int, float | None]],
    more: dict[str, Any],
    says: list[str],
) -> None:
    """Nothing where there is nothing to gain, and never fewer workers."""
    options = {} if reading is None else {"num_workers": reading}
    found = changes(measured(*rates, reading=options, **more))
    assert len(found) == len(says)
    for change, words in zip(found, says, strict=True):
        assert change.startswith(words)


def test_jobs_on_gpus_hear_of_pinning_and_of_how_fast_a_step_may_be() -> None:
    """A CPU cannot measure it; what reads fastest says which step would wait."""
    raw = measured((0, 100.0), (2, 640.0), data_s=0.0)
    found = changes(raw, has_gpus=True)
    assert "less than 0.1 s waits for data" in found[0]
    assert "pin_memory=True" in found[1]
    pinned = measured((0, 100.0), data_s=0.0, reading={"num_workers": 0, "pin_memory": True})
    assert len(changes(pinned, has_gpus=True)) == 1


@pytest.mark.parametrize("raw", [b"", b"{}", measured(steps=0), measured(step_s="1")])
def test_measures_that_make_no_sense_are_refused(raw: bytes) -> None:
    """A process that was ended writes nothing, and a script may write anything there."""
    with pytest.raises(Refused):
        report_of(raw, has_gpus=False)


def tried(source: str, tmp_path: Path, patch: pytest.MonkeyPatch) -> LoaderReport:
    """Try the loader of a script."""
    patch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    patch.chdir(tmp_path)
    Path("train.py").write_text(source)
    return try_loader(resolve("train.py", flags={}, args=()).spec, lambda _: None)


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_script_whose_samples_are_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own batches are read, in its own way and by workers; nothing of it is left."""
    report = tried(SLOW, tmp_path, monkeypatch)
    assert (report.num_workers, report.global_batch_size) == (0, 8)
    assert report.data_s > 8 * 0.02
    rates = {each.num_workers: each.samples_per_s for each in report.tried}
    assert rates[0] is not None
    assert rates[0] < 50
    assert 2 not in rates or (rates[2] or 0.0) > 1.2 * rates[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "train.py"]
    assert not list((tmp_path / "home" / "smokes").iterdir())


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_script_that_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told by its line, as by a smoke."""
    with pytest.raises(SmokeFailed, match=r"train.py line 3 \(`1 / 0`\): ZeroDivision"):
        tried("import spotguard.runtime\n\n1 / 0\n", tmp_path, monkeypatch)
