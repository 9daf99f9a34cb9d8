"""Whole trainings under HF's Trainer that lose and gain ranks, beside one that nobody disturbs."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.runtime.harness.processes import wait_until

if TYPE_CHECKING:
    from tests.integrations.transformers.harness import TrainerRuns

pytest.importorskip("transformers")  # an extra, which `make integrations` installs
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]  # the first one loads the framework

EPOCHS: dict[str, Any] = {
    "args": {
        "num_train_epochs": 3,
        "gradient_accumulation_steps": 3,
        "warmup_steps": 2,
        "eval_strategy": "epoch",
        "metric_for_best_model": "loss",
        "include_num_input_tokens_seen": "non_padding",
    },
    "global_batch_size": 12,
}
"""Three epochs of 50 samples: 5 steps each, of 6 micro-batches, the last one of 2 samples."""


def test_ranks_come_and_go_in_mid_epoch(runs: TrainerRuns) -> None:
    """4, 2, then 3 ranks: each sample once an epoch, and the losses of one process.

    Three ranks have two micro-batches each, and one and none in an epoch's last step. The first two
    attempts are cut where no epoch ends: what comes at an epoch's end, comes once.
    """
    runs.run("alone", EPOCHS)
    for ranks, until in ((4, 4), (2, 8), (3, None)):
        runs.run("elastic", EPOCHS, ranks=ranks, until=until)

    alone, elastic = runs.result("alone"), runs.result("elastic")
    assert runs.samples("elastic") == runs.samples("alone")
    assert set(runs.samples("alone")) == {0, 1, 2}
    assert all(set(times.values()) == {1} for times in runs.samples("alone").values())
    assert elastic.losses() == pytest.approx(alone.losses(), rel=1e-5)
    assert elastic.differs_by(alone) < 1e-3
    assert (elastic.step, elastic.tokens) == (alone.step, alone.tokens)
    assert sum("eval_loss" in entry for entry in elastic.log) == 3


def test_a_resume_on_as_many_ranks_is_bitwise(runs: TrainerRuns) -> None:
    """Two ranks, told to stop within an epoch and at its end: all that is logged and trained.

    The sums of the losses since the last log, flops and tokens, and the epoch go on, too.
    """
    runs.run("alone", EPOCHS, ranks=2)
    for step in (4, 10):
        started = runs.start("told", EPOCHS, ranks=2, SPOTGUARD_HOLD=f"{step}:100")
        started[0].wait_for("resumed at" if step > 4 else "accumulated on each")
        _wait_for_step(runs, "told", step)
        started[1].kill(signal.SIGTERM)
        assert [job.wait() for job in started] == [75, 75], started[0].said
    runs.run("told", EPOCHS, ranks=2)

    assert runs.result("told").weights == runs.result("alone").weights
    assert runs.result("told").logged() == runs.result("alone").logged()


def test_a_rank_that_is_killed_costs_no_step(runs: TrainerRuns) -> None:
    """kill -9 of a rank in the last step of an epoch: its evaluation comes after the resume."""
    told = {**EPOCHS, "waits_at": 5}
    runs.run("alone", EPOCHS, ranks=2)
    started = runs.start("killed", told, ranks=2)
    for job in started:
        job.wait_for("waits after 5")
    started[1].kill(signal.SIGKILL)
    assert started[1].wait() == -9
    (runs.jobs.folder / "go-on").touch()
    assert started[0].wait() == 75, started[0].said
    runs.run("killed", told, ranks=2)

    assert runs.result("killed").weights == runs.result("alone").weights
    assert runs.result("killed").logged() == runs.result("alone").logged()


def test_an_evaluation_is_left_at_one_batch_and_comes_again(runs: TrainerRuns) -> None:
    """SIGTERM within an evaluation: both ranks leave it, saved, and the resume begins with it."""
    told = {
        "args": {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 4},
        "evaluate_s": 0.3,
    }
    runs.run("alone", told, ranks=2)
    started = runs.start("told", told, ranks=2)
    started[0].wait_for("evaluating after 4")
    started[0].kill(signal.SIGTERM)
    assert [job.wait() for job in started] == [75, 75], started[0].said
    assert started[0].said.count("evaluating after 4") < 3
    said = runs.run("told", told, ranks=2)

    assert said.count("evaluating after 4") == 3
    assert runs.result("told").logged() == runs.result("alone").logged()
    assert runs.result("told").weights == runs.result("alone").weights


def test_what_an_epoch_logs_is_that_of_its_last_step(runs: TrainerRuns) -> None:
    """SIGTERM in the evaluation at its end: the entry has the norm and the rate all the same."""
    told = {
        "args": {"num_train_epochs": 2, "logging_strategy": "epoch", "eval_strategy": "epoch"},
        "evaluate_s": 0.3,
    }
    runs.run("alone", told)
    [started] = runs.start("told", told)
    started.wait_for("evaluating after 13")
    started.kill(signal.SIGTERM)
    assert started.wait() == 75, started.said
    runs.run("told", told)

    logged = runs.result("told").logged()
    assert sum("grad_norm" in entry for entry in logged) == 2
    assert logged == runs.result("alone").logged()


def test_the_best_weights_are_loaded_though_the_trainers_own_are_gone(runs: TrainerRuns) -> None:
    """`load_best_model_at_end` after a resume elsewhere, on another number of ranks.

    `save_strategy` goes on to write the Trainer's own folders.
    """
    told = {
        "args": {
            "max_steps": 8,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "steps",
            "save_steps": 2,
            "load_best_model_at_end": True,
            "learning_rate": 5e-2,
        }
    }
    runs.run("alone", told)
    runs.run("moved", told, until=5)
    folder = runs.jobs.folder / "out-moved"
    assert {path.name for path in folder.iterdir()} == {"checkpoint-2", "checkpoint-4"}
    folder.rename(runs.jobs.folder / "elsewhere")
    runs.run("moved", told, ranks=2)

    alone, moved = runs.result("alone"), runs.result("moved")
    assert moved.best == pytest.approx(alone.best, rel=0.02)  # ranks evaluate other batches
    assert moved.differs_by(alone) < 1e-3


def test_a_loss_that_meets_other_ranks_does_not_hang(runs: TrainerRuns) -> None:
    """A Trainer whose `compute_loss` gathers, where three ranks have uneven micro-batches."""
    told = {"args": {"max_steps": 4}, "global_batch_size": 14, "meets": True}
    runs.run("alone", told)
    runs.run("three", told, ranks=3)

    assert runs.result("three").losses() == pytest.approx(runs.result("alone").losses(), rel=1e-5)


def test_a_stream_is_read_in_one_order_by_any_ranks(runs: TrainerRuns) -> None:
    """An `IterableDataset` without a state, through two passes: 3, then 2 ranks, as one process."""
    told = {"args": {"max_steps": 9}, "global_batch_size": 14, "stream": True}
    runs.run("alone", told)
    for ranks, until in ((3, 4), (2, None)):
        runs.run("elastic", told, ranks=ranks, until=until)
    runs.run("resumed", told, until=5)
    runs.run("resumed", told)

    alone, elastic = runs.result("alone"), runs.result("elastic")
    assert elastic.losses() == pytest.approx(alone.losses(), rel=1e-5)
    assert elastic.tokens == alone.tokens
    assert runs.result("resumed").weights == alone.weights
    assert runs.result("resumed").logged() == alone.logged()


def test_a_loss_that_ignores_the_count_is_a_mean(runs: TrainerRuns) -> None:
    """A `compute_loss` of the script's own that never looks at `num_items_in_batch`.

    It cannot have divided by it: the means of uneven micro-batches count by their samples, so what
    is logged, clipped and trained on is no sum over ranks and accumulated batches.
    """
    told = {
        "args": {"max_steps": 4, "logging_steps": 1},
        "global_batch_size": 13,
        "own_loss": True,
    }
    runs.run("alone", told)
    for ranks, until in ((3, 2), (2, None)):
        runs.run("elastic", told, ranks=ranks, until=until)

    alone, elastic = runs.result("alone"), runs.result("elastic")
    assert elastic.losses() == pytest.approx(alone.losses(), rel=1e-5)
    assert max(alone.losses()) < 4, "a mean over 32 words, of which a guess costs log(32)"


def test_the_number_of_ranks_may_change_with_no_bit_of_a_difference(runs: TrainerRuns) -> None:
    """With `exact="bitwise"`: 3, then 2 ranks, and one process."""
    told = {"args": {"max_steps": 6}, "global_batch_size": 14, "exact": "bitwise"}
    runs.run("alone", told)
    runs.run("exact", told, ranks=3, until=3)
    runs.run("exact", told, ranks=2)

    assert runs.result("exact").weights == runs.result("alone").weights


def _wait_for_step(runs: TrainerRuns, name: str, step: int) -> None:
    trace = runs.jobs.folder / f"{name}.trace"
    wait_until(
        lambda: trace.exists() and f'"step": {step - 1},' in trace.read_text(),
        lambda: f"step {step}",
    )
