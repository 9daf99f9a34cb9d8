from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")  # an extra, which `make integrations` installs

from transformers import (
    DataCollatorForLanguageModeling,
    DefaultDataCollator,
    Trainer,
    TrainerCallback,
    default_data_collator,
)
from transformers.trainer_callback import ExportableState, TrainerControl, TrainerState
from transformers.trainer_utils import RemoveColumnsCollator

from spotguard.integrations.transformers import state, surviving_trainer
from spotguard.runtime.data import loader


@pytest.mark.parametrize("name", surviving_trainer.METHODS)
def test_methods_that_are_not_public_are_as_they_were(name: str) -> None:
    """Each of the Trainer's methods that is stood before is there, with the arguments it needs."""
    found = inspect.signature(getattr(Trainer, name)).parameters
    assert set(surviving_trainer.METHODS[name]) <= set(found)


def test_the_loop_is_made_of_these_methods() -> None:
    """They are called where they are expected: else what stands before them would do nothing."""
    loop = inspect.getsource(Trainer._inner_training_loop)
    for call in ("_init_training_state", "_prepare_for_training", "_run_epoch", "on_train_begin"):
        assert f"{call}(" in loop
    assert loop.index("get_train_dataloader(") < loop.index("_init_training_state(")
    assert loop.index("_tr_loss = ") < loop.index("on_train_begin(")
    epoch = inspect.getsource(Trainer._run_epoch)
    assert epoch.index("get_batch_samples(") < epoch.index("training_step(")
    assert epoch.index("on_step_end(") < epoch.index("_maybe_log_save_evaluate(")


@pytest.mark.parametrize("name", surviving_trainer.ATTRIBUTES)
def test_attributes_that_are_not_public_are_as_they_were(name: str) -> None:
    """What is saved of the sums of losses is where the loop has it."""
    assert f"self.{name} = " in inspect.getsource(Trainer._inner_training_loop)
    used = inspect.getsource(Trainer._maybe_log_save_evaluate) + inspect.getsource(
        Trainer._finalize_training
    )
    assert name.removeprefix("_tr_loss") in used


def test_the_state_has_what_is_saved_of_it() -> None:
    """Fields of the Trainer's state, flags of its control, callbacks' own state."""
    fields = vars(TrainerState())
    assert {*state._OF_THE_STATE, "best_metric", "log_history", "total_flos"} <= set(fields)
    assert set(state.FLAGS) <= set(vars(TrainerControl()))
    assert {"args", "attributes"} == set(TrainerControl().state())
    assert issubclass(TrainerControl, ExportableState)


def test_callbacks_are_told_when_a_trainer_is_made() -> None:
    """`on_init_end` is where a callback meets its Trainer, before any data are asked for."""
    assert hasattr(TrainerCallback, "on_init_end")
    made = inspect.getsource(Trainer.__init__)
    assert "on_init_end(self.args" in made


def test_the_history_is_written_once_and_read_back() -> None:
    """Entries of any kind come back as they were; full pages are not written anew."""
    history = state.History()
    entries: list[dict[str, Any]] = []
    for step in range(200):
        entries.append({"loss": 1 / (step + 1), "step": step, "nan": float("nan")})
        pages = history.pages(entries)
    assert history.pages(entries)[:3] == pages[:3]
    assert all(mine is theirs for mine, theirs in zip(history.pages(entries), pages, strict=True))

    again = state.History()
    found = again.restore(pages)
    assert [entry["loss"] for entry in found] == [entry["loss"] for entry in entries]
    assert again.pages(found) == pages
    assert len(pages) == 4


def test_what_callbacks_log_may_be_anything() -> None:
    """Numbers of torch and words are kept as JSON has them."""
    logged = [{"a": torch.tensor(2.0), "b": object, "c": None, "d": "word"}]
    [entry] = state.History().restore(state.History().pages(logged))
    assert entry == {"a": 2.0, "b": str(object), "c": None, "d": "word"}


def test_collators_that_only_stack_are_known_inside_the_trainers_own() -> None:
    """Each that is named is there; around any other one reading may draw, and is seeded."""
    for name in loader._STACKING:
        module, _, kind = name.rpartition(".")
        assert hasattr(importlib.import_module(module), kind)
    for collator, stacks in (
        (default_data_collator, True),
        (DefaultDataCollator(), True),
        (lambda samples: samples, False),
        (DataCollatorForLanguageModeling.__new__(DataCollatorForLanguageModeling), False),
        (type("Mine", (DefaultDataCollator,), {})(), False),
    ):
        assert loader._only_stacks(collator) is stacks
        assert loader._only_stacks(RemoveColumnsCollator(collator, ["x"])) is stacks
