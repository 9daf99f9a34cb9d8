"""What does not go together with surviving is refused in one sentence, with its exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from spotguard.errors import MissingExtra, UsageError

pytest.importorskip("transformers")  # an extra, which `make integrations` installs

from spotguard.integrations import installed
from spotguard.integrations.transformers import attach

if TYPE_CHECKING:
    from tests.integrations.transformers.harness import TrainerRuns

pytestmark = pytest.mark.timeout(900)  # the first one loads the framework


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"args": {"auto_find_batch_size": True}}, "auto_find_batch_size changes the batch"),
        ({"args": {"enable_jit_checkpoint": True}}, "enable_jit_checkpoint saves at SIGTERM"),
        (
            {"args": {"train_sampling_strategy": "batch_rebalance"}},
            "a BatchRebalanceSampler cuts the batches by the number of ranks",
        ),
        (
            {"train": {"resume_from_checkpoint": "out/checkpoint-5"}},
            "cannot begin a run of spotguard, which goes on from its own checkpoints only",
        ),
        ({"global_batch_size": -4}, "global_batch_size is -4"),
        ({"added_late": True}, "was added to a Trainer that was made already"),
        ({"twice": True}, "this Trainer has spotguard already"),
        ({"trains_again": True}, "trainer.train() was called twice"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else "",
)
@pytest.mark.e2e
def test_refusals(runs: TrainerRuns, told: dict[str, Any], sentence: str) -> None:
    """One sentence that names the argument and the way out, no traceback, exit code 2."""
    told = {**told, "args": {"max_steps": 2, **told.get("args", {})}}
    said = runs.run("refused", told, code=2)
    assert sentence in said
    assert "Traceback" not in said
    assert "trainer_job.py:" in said


@pytest.mark.e2e
def test_a_checkpoint_that_a_script_finds_later_is_ignored(runs: TrainerRuns) -> None:
    """A script that looks for its newest folder finds one in later attempts: that is no error."""
    told: dict[str, Any] = {"args": {"max_steps": 4, "logging_steps": 1}}
    runs.run("alone", told)
    runs.run("found", told, until=2)
    said = runs.run("found", {**told, "train": {"resume_from_checkpoint": "out/checkpoint-1"}})

    assert "resume_from_checkpoint='out/checkpoint-1' is ignored" in said
    assert runs.result("found").weights == runs.result("alone").weights


@pytest.mark.e2e
@pytest.mark.parametrize(
    "args",
    [
        {"train_sampling_strategy": "group_by_length"},
        {"bf16": True, "dataloader_num_workers": 1},
        {"dataloader_drop_last": True, "num_train_epochs": 0.5},
        {"label_smoothing_factor": 0.1, "optim": "adafactor"},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2}
        | {"metric_for_best_model": "loss"},
    ],
    ids=lambda args: next(iter(args)),
)
def test_arguments_of_many_kinds(runs: TrainerRuns, args: dict[str, Any]) -> None:
    """Samplers, schedules, precisions and optimizers: a resume in the middle changes nothing."""
    told: dict[str, Any] = {"args": {"logging_steps": 1, **args}, "line": "attach"}
    if "num_train_epochs" not in args:
        told["args"]["max_steps"] = 6
    runs.run("alone", told)
    runs.run("resumed", told, until=3)
    runs.run("resumed", told)

    assert runs.result("resumed").logged() == runs.result("alone").logged()
    assert runs.result("resumed").weights == runs.result("alone").weights


@pytest.mark.e2e
def test_early_stopping_counts_on(runs: TrainerRuns) -> None:
    """A callback's own state is that of the boundary: it stops where it would have."""
    told: dict[str, Any] = {
        "args": {
            "max_steps": 20,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "save_strategy": "best",
            "metric_for_best_model": "loss",
            "learning_rate": 1.0,
        },
        "patience": 3,
    }
    runs.run("alone", told)
    stopped = runs.result("alone").step
    assert 3 < stopped < 20
    runs.run("resumed", told, until=stopped - 2)
    runs.run("resumed", told)
    assert runs.result("resumed").logged() == runs.result("alone").logged()


def test_attach_wants_a_trainer() -> None:
    """Something else is named."""
    with pytest.raises(UsageError, match=r"needs a transformers\.Trainer, not a str"):
        attach("trainer")  # type: ignore[arg-type]


def test_a_version_that_is_too_old_is_named() -> None:
    """The sentence says what is installed, what is needed, and how to get it."""
    with pytest.raises(MissingExtra, match=r"needs transformers 99\.1 or later: .* is too old"):
        installed.check_installed("transformers", transformers="99.1")
