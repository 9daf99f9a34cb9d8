"""What a Trainer's class overrides decides whether it survives; its name does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")  # an extra, which `make integrations` installs

from transformers import Trainer

from spotguard.errors import UsageError
from spotguard.integrations.transformers import overrides
from spotguard.integrations.transformers.beside import Attached


class Kept(Trainer):
    """Overrides what is called from where the Trainer's own would be."""

    def train(self, *args: Any, **options: Any) -> Any:
        """Do something before."""
        return super().train(*args, **options)

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        """Return another loss."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        return dict(inputs)


class OwnEpoch(Trainer):
    """Has a loop of its own."""

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        for _ in range(3):
            self.optimizer.step()


class Restores(Trainer):
    """Reads more from the Trainer's folder, and does something that nobody knows."""

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        self.coefficient = 1.0

    def _mixed_mesh_grad_norm(self, *args: Any) -> Any:
        return 1


class Rolls(Kept):
    """Keeps what it made."""

    loss_is_scaled_for_ga: bool | None = True
    num_iterations = 1

    def _prepare_inputs(self, inputs: Any) -> Any:
        self.kept = inputs
        return self.kept


def made(kind: type, **more: Any) -> Any:
    """Return a trainer of which only the class and a few attributes count."""
    trainer: Any = object.__new__(kind)
    trainer.args = SimpleNamespace(per_device_train_batch_size=4)
    trainer.__dict__.update(more)
    return trainer


def test_overrides_that_are_called_in_their_place_are_kept() -> None:
    """None is refused, and nothing is said; nor of a plain Trainer."""
    for kind in (Trainer, Kept):
        assert overrides.own_loop(made(kind)) is None
        assert not list(overrides.doubts(made(kind)))
        assert overrides.rollouts_of(made(kind), 16, 3, SimpleNamespace()) is None  # type: ignore[arg-type]


def test_a_loop_of_ones_own_is_refused_and_what_is_unknown_is_told() -> None:
    """The sentence names the class and the method."""
    assert overrides.own_loop(made(OwnEpoch)) == (
        "OwnEpoch._run_epoch is a training loop of its own"
    )
    told = list(overrides.doubts(made(Restores)))
    assert [sentence.split(" is ")[0] for sentence in told[:1]] == [
        "Restores._load_optimizer_and_scheduler"
    ]
    assert "Restores overrides _mixed_mesh_grad_norm of the Trainer" in told[1]


@pytest.mark.parametrize(
    ("batch_size", "more", "world", "sentence"),
    [
        (12, {}, 2, None),
        (4, {}, 2, None),
        (8, {}, 2, "which last for more than one optimizer step"),
        (24, {}, 2, "which last for more than one optimizer step"),
        (10, {}, 2, "which last for more than one optimizer step"),
        (12, {"num_iterations": 2}, 2, "which last for more than one optimizer step"),
        (12, {}, 3, "dealt to 2 ranks when the run began"),
        (12, {"loss_is_scaled_for_ga": None}, 2, "does not say by loss_is_scaled_for_ga"),
    ],
)
def test_rollouts_are_for_one_step_or_refused(
    batch_size: int, more: dict[str, Any], world: int, sentence: str | None
) -> None:
    """Three micro-batches of four: what is made with a step's first one must not last longer."""
    run: Any = SimpleNamespace(world_size=world, reference_world_size=2)
    trainer = made(Rolls, **more)
    if sentence is None:
        assert overrides.rollouts_of(trainer, batch_size, 3, run) == (3, ("kept",))
        return
    with pytest.raises(UsageError, match=sentence):
        overrides.rollouts_of(trainer, batch_size, 3, run)


def test_a_second_model_that_moves_unseen_is_refused() -> None:
    """What no optimizer trains and no callback holds is looked at in the first steps."""
    torch.manual_seed(0)
    model, teacher = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer: Any = SimpleNamespace(
        model=model, teachers=[teacher], callback_handler=SimpleNamespace(callbacks=[])
    )
    attached = Attached(trainer, optimizer, [])
    assert not attached.to_track()
    attached.watch()
    attached.check()
    with torch.no_grad():
        teacher.weight.mul_(0.9)
    with pytest.raises(UsageError, match=r"trainer\.teachers_0 changes in training"):
        attached.check()


def test_parameters_of_nobody_are_tracked_by_their_place() -> None:
    """A head that only the optimizer knows of, and one that a dict on the trainer has."""
    model, head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)
    losses = {"a": torch.nn.Sequential(model, torch.nn.BatchNorm1d(3))}
    groups = [{"params": list(module.parameters())} for module in (model, losses["a"][1], head)]
    trainer: Any = SimpleNamespace(
        model=model, loss=losses, callback_handler=SimpleNamespace(callbacks=[])
    )
    found = Attached(trainer, torch.optim.SGD(groups, lr=0.1), []).to_track()
    assert set(found["trainer_loss_a"].state_dict()) == {
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    others = found["trainer_optimizer_parameters"]
    assert [id(p) for p in others.parameters()] == [id(head.weight), id(head.bias)]
