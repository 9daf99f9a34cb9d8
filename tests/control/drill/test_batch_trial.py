"""`plan --probe`: sizes of micro-batches, what each takes, and which one `auto` takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.drill.batch_trial import curve_of, try_batches
from spotguard.control.drill.smoke import trial
from spotguard.control.drill.smoke.process import Facts
from spotguard.errors import EnvironmentFailure, SmokeFailed, UsageError
from spotguard.events import env
from spotguard.events.untrusted import Refused
from spotguard.shared.units import format_bytes
from spotguard.spec.sources import resolve

if TYPE_CHECKING:
    from spotguard.policy.plan.batch_curve import BatchCurve

AUTO = """
import torch
from torch import nn

import spotguard.runtime as spotguard

torch.set_num_threads(1)
run = spotguard.init(seed=1)
net = nn.Sequential(nn.Linear(8, 2048), *[nn.Tanh() for _ in range(6)], nn.Linear(2048, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
run.track(model=net, optimizer=optimizer)
loss_of = lambda x: net(x).square().mean()
data = torch.randn(16000, 8)
loader = run.loader(data, global_batch_size=16000, micro_batch_size="auto", probe=loss_of)
for step in run.steps(loader, total=40):
    open("trained", "w")
"""
"""Of one sample more, nine tensors of 8 kB live at once, and two in the backward pass."""


def told(**more: Any) -> dict[str, Any]:
    """Return what a job writes down."""
    plain: dict[str, Any] = {
        "memory_bytes": 1_000_000_000,
        "kept_free_bytes": 100_000_000,
        "global_batch_size": 512,
        "most": 256,
        "chosen": 60,
        "is_whole": True,
        "tried": [
            {"samples": 2, "fits": True, "peak_bytes": 400_000_000, "pass_s": 0.1},
            {"samples": 128, "fits": False, "peak_bytes": None, "pass_s": None},
            {"samples": 62, "fits": True, "peak_bytes": 700_000_000, "pass_s": 1.0},
        ],
    }
    return {**plain, **more}


def test_the_curve_says_what_one_sample_more_takes() -> None:
    """Between the smallest and the largest that fit; nothing where less is known."""
    curve = curve_of(told(), ranks=2)
    assert [each.samples for each in curve.tried] == [2, 62, 128]
    assert (curve.chosen, curve.most, curve.ranks) == (60, 256, 2)
    assert curve.bytes_per_sample == 5_000_000
    assert curve_of(told(tried=told()["tried"][:2]), ranks=1).bytes_per_sample is None
    assert curve_of(told(tried=[]), ranks=1).bytes_per_sample is None


@pytest.mark.parametrize("wrong", [{"memory_bytes": "1"}, {"most": 0}, {"tried": [{}]}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    """A script may write anything there."""
    with pytest.raises(Refused):
        curve_of(told(**wrong), ranks=1)


def tried(
    source: str, tmp_path: Path, patch: pytest.MonkeyPatch, mb: int = 700, **flags: Any
) -> BatchCurve:
    """Try the micro-batches of a script in so much memory."""
    patch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    patch.chdir(tmp_path)
    Path("train.py").write_text(source)
    spec = resolve("train.py", flags=flags, args=()).spec
    return try_batches(spec, lambda _: None, memory_bytes=mb * 1_000_000)


def ended(
    facts: Facts, written: dict[str, Any] | None, tmp_path: Path, patch: pytest.MonkeyPatch
) -> BatchCurve:
    """Return the curve of a process that ended so, and had written this."""

    def run(spec: Any, folder: Path, stint: Any) -> Facts:
        (folder / "room").mkdir()
        if written is not None:
            asked = stint.variables[env.TRY_BATCH].format(room=folder / "room")
            Path(asked.rpartition(":")[2]).write_text(json.dumps(written))
        return facts

    patch.setattr(trial, "run_stint", run)
    return tried(AUTO, tmp_path, patch, mb=1)


LATE = Facts(exit_code=None, ended_for="time", seconds=120)
UNFINISHED = told(is_whole=False, chosen=None, kept_free_bytes=None)


def test_a_curve_that_time_has_cut_short_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was tried until then is true."""
    assert len(ended(LATE, UNFINISHED, tmp_path, monkeypatch).tried) == 3


@pytest.mark.parametrize("written", [None, told(is_whole=False, tried=[])])
def test_a_first_size_that_takes_too_long_is_no_fault_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: dict[str, Any] | None
) -> None:
    """Nor does an option of the smoke's help."""
    with pytest.raises(EnvironmentFailure, match=r"train\.py: ") as problem:
        ended(LATE, written, tmp_path, monkeypatch)
    assert "smoke" not in f"{problem.value} {problem.value.hint}"


@pytest.mark.parametrize(
    ("facts", "kind", "says"),
    [
        (Facts(exit_code=-11), SmokeFailed, "SIGSEGV"),
        (Facts(exit_code=None, ended_for="memory"), EnvironmentFailure, "memory"),
        (Facts(exit_code=1, printed="Thread creation failed: ..."), EnvironmentFailure, "memory"),
    ],
)
def test_what_ends_a_trial_is_told_though_sizes_were_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: Facts, kind: Any, says: str
) -> None:
    """Their curve would say that time was over."""
    with pytest.raises(kind, match=says):
        ended(facts, UNFINISHED, tmp_path, monkeypatch)


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_script_with_auto_has_a_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From few samples to what does not fit; a rank of two nodes has half a step. Nothing is left.

    How much a sample takes is what its tensors do, whatever the time says on a busy machine.
    """
    curve = tried(AUTO, tmp_path, monkeypatch, nodes="2")
    assert (curve.memory_bytes, curve.global_batch_size) == (700_000_000, 16_000)
    assert (curve.ranks, curve.most) == (2, 8000)
    fitting = [each for each in curve.tried if each.fits]
    assert fitting[0].samples == 2
    assert all(each.samples < 8000 for each in fitting)
    assert not curve.tried[-1].fits
    if curve.chosen is not None:  # else this machine is too busy for all of it
        assert 0.8 * fitting[-1].samples <= curve.chosen <= fitting[-1].samples
    for each in fitting:
        assert each.peak_bytes is None or each.peak_bytes < 700_000_000, format_bytes(
            each.peak_bytes
        )
    if curve.bytes_per_sample is not None:
        assert 30_000 < curve.bytes_per_sample < 300_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "train.py"]
    assert not list((tmp_path / "home" / "smokes").iterdir())


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_script_that_says_its_size_is_told_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line of its loader, and what to write there."""
    fixed = AUTO.replace('micro_batch_size="auto", probe=loss_of', "micro_batch_size=100")
    with pytest.raises(UsageError, match=r"train.py line 14 \(.*micro-batches of 100") as problem:
        tried(fixed, tmp_path, monkeypatch)
    assert 'micro_batch_size="auto", probe=' in problem.value.hint


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_script_that_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told by its line, as by a smoke: also what its `probe` does wrong."""
    wrong = AUTO.replace("net(x).square()", "net(x[:, :3]).square()")
    with pytest.raises(SmokeFailed, match=r"train.py line 12 \(.*shapes cannot be multiplied"):
        tried(wrong, tmp_path, monkeypatch)


def test_more_memory_than_there_is_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is run."""
    with pytest.raises(UsageError, match="more than this machine can give"):
        tried(AUTO, tmp_path, monkeypatch, mb=10**9)
