"""Trainers that do more in their own way: loaders, batches, weights beside the model, rollouts."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.integrations.transformers.harness import TrainerRuns

pytest.importorskip("transformers")  # an extra, which `make integrations` installs
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]  # the first one loads the framework


def test_the_loader_is_believed_and_not_the_argument(runs: TrainerRuns) -> None:
    """Batches of three where the argument says two: nine samples a step, also on three ranks."""
    told = {
        "own_loader": True,
        "global_batch_size": 9,
        "args": {"max_steps": 8, "gradient_accumulation_steps": 3, "logging_steps": 1},
    }
    said = runs.run("alone", told)
    assert "a global batch of 9 samples in micro-batches of 3" in said
    assert "makes batches of 3 samples: that counts" in said
    runs.run("elastic", told, ranks=3, until=4)
    runs.run("elastic", told)

    assert runs.samples("elastic") == runs.samples("alone")
    assert sum(runs.samples("alone")[0].values()) == 50, "six steps, the last of five samples"
    alone, elastic = runs.result("alone"), runs.result("elastic")
    assert elastic.losses() == pytest.approx(alone.losses(), rel=1e-5)


def test_with_split_batches_the_loaders_batch_is_that_of_all_ranks(runs: TrainerRuns) -> None:
    """Of six samples each of three ranks has two; accumulated once more, twelve make a step."""
    args = {"max_steps": 1, "per_device_train_batch_size": 6}
    told = {"args": {**args, "accelerator_config": {"split_batches": True}}}
    said = runs.run("split", told, ranks=3)
    assert "a global batch of 12 samples in micro-batches of 2: 2 accumulated" in said


def test_a_batch_samplers_batches_stay_whole(runs: TrainerRuns) -> None:
    """Each of them once an epoch, on three ranks and on one; a loss may take parts out of them."""
    told = {
        "own_batches": True,
        "global_batch_size": 12,
        "args": {"max_steps": 9, "gradient_accumulation_steps": 4, "logging_steps": 1},
    }
    runs.run("alone", told)
    runs.run("elastic", told, ranks=3, until=4)
    runs.run("elastic", told)

    assert runs.samples("elastic") == runs.samples("alone")
    assert runs.samples("alone")[0] == Counter(range(50)), "17 batches, in 5 steps"
    alone, elastic = runs.result("alone"), runs.result("elastic")
    assert elastic.losses() == pytest.approx(alone.losses(), rel=1e-5)


def test_weights_beside_the_model_are_saved(runs: TrainerRuns) -> None:
    """Those of a loss, and a second model that a callback moves, to the last bit.

    The ranks train one head, though it is in no DDP. (DDP on three is exact but for last bits.)
    """
    told = {
        "own_head": True,
        "args": {"max_steps": 6, "gradient_accumulation_steps": 3, "logging_steps": 1},
    }
    runs.run("alone", told, ranks=2)
    runs.run("resumed", told, ranks=2, until=3)
    runs.run("resumed", told, ranks=2)
    runs.run("one", told | {"global_batch_size": 12})

    alone, resumed, one = (runs.result(name) for name in ("alone", "resumed", "one"))
    assert {"head.weight", "reference.lm_head.weight"} <= set(alone.weights)
    assert resumed.weights == alone.weights
    assert resumed.losses() == alone.losses()
    assert one.differs_by(alone) < 1e-3


def test_rollouts_of_each_step_are_made_anew(runs: TrainerRuns) -> None:
    """A step's rollouts are of samples of its own, dealt to the ranks as the Trainer deals them.

    The loss counts once, though the trainer divides it by what the loop says.
    """
    told: dict[str, Any] = {
        "rollouts": True,
        "args": {"max_steps": 4, "gradient_accumulation_steps": 3, "logging_steps": 1},
    }
    said = runs.run("alone", told, ranks=2)
    made = [line for line in said.splitlines() if line.startswith("rollouts of")]
    assert len(made) == len(set(made)) == 4
    runs.run("resumed", told, ranks=2, until=2)
    runs.run("resumed", told, ranks=2)

    alone, resumed = runs.result("alone"), runs.result("resumed")
    assert resumed.weights == alone.weights
    assert resumed.losses() == alone.losses()
    assert 2 < alone.losses()[0] < 4.5, "a mean over 32 words, of which a guess costs log(32)"

    said = runs.run("resumed", told | {"args": told["args"] | {"max_steps": 6}}, code=2)
    assert "dealt to 2 ranks when the run began" in said


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"num_iterations": 2}, "which last for more than one optimizer step"),
        ({"lasts": 2}, "trained a second step on what is in kept"),
    ],
)
def test_rollouts_that_last_longer_are_refused(
    runs: TrainerRuns, more: dict[str, Any], sentence: str
) -> None:
    """No checkpoint has them: said before the training, or in its second step."""
    told = {"rollouts": True, "args": {"max_steps": 6, "gradient_accumulation_steps": 3}, **more}
    said = runs.run("refused", told, code=2)
    assert sentence in said
    assert "Traceback" not in said


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_finished_training_goes_on_when_more_steps_are_asked_for(
    runs: TrainerRuns, schedule: str
) -> None:
    """14 steps after 6, in the midst of an epoch: as if it had been 14 from the start.

    A schedule that depends on the length cannot be: it is said, and goes on as the longer one.
    """
    args = {"num_train_epochs": 3, "logging_steps": 1, "lr_scheduler_type": schedule}
    told: dict[str, Any] = {"args": {**args, "gradient_accumulation_steps": 3}}
    runs.run("alone", told | {"args": told["args"] | {"max_steps": 24}})
    runs.run("longer", told | {"args": told["args"] | {"max_steps": 6}})
    said = runs.run("longer", told | {"args": told["args"] | {"max_steps": 24}})

    alone, longer = runs.result("alone"), runs.result("longer")
    assert longer.step == 24
    assert runs.samples("longer") == runs.samples("alone")
    entries = [entry for entry in longer.logged() if "loss" in entry]
    asked_for = [entry for entry in alone.logged() if "loss" in entry]
    assert [e["epoch"] for e in entries] == [e["epoch"] for e in asked_for]
    assert [e["learning_rate"] for e in entries[6:]] == [e["learning_rate"] for e in asked_for[6:]]
    if schedule == "constant":
        assert longer.weights == alone.weights
    else:
        assert "the steps before had those of the shorter one" in said
