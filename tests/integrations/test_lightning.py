"""What of Lightning's we rely on, and the parts of the callback that need no process."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch

from spotguard.errors import UsageError
from spotguard.integrations.partial_epochs import FirstOfEpoch

pl = pytest.importorskip("lightning.pytorch")


def trainer(**options: Any) -> Any:
    """Return a quiet Trainer on the CPU."""
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


@pytest.mark.filterwarnings("ignore")
def test_the_private_names_of_lightning_are_there() -> None:
    """Each name that `private_names` and `fit` use is there, and means what it did."""
    made = trainer()
    fit_loop = made.fit_loop
    assert fit_loop._data_source.name == "train_dataloader"
    assert callable(fit_loop._data_source.dataloader)
    assert fit_loop.epoch_loop._batches_that_stepped == 0
    assert fit_loop.epoch_loop.val_loop.batch_progress.total.ready == 0
    assert fit_loop.epoch_progress.current.processed == 0
    assert fit_loop._restarting is False
    assert "self.restarting" in inspect.getsource(type(fit_loop).on_advance_end)
    assert made._logger_connector._callback_metrics == {}
    assert callable(made._logger_connector.on_batch_start)
    made.state.fn, made.training = "fit", True
    assert callable(made._results._extract_batch_size)
    assert "batch_size = self._extract_batch_size(" in inspect.getsource(type(made._results).log)
    assert callable(pl.trainer.call._call_strategy_hook)
    assert callable(pl.LightningModule()._on_before_batch_transfer)
    assert hasattr(pl.strategies.DDPStrategy(), "_model_averager")
    advance = inspect.getsource(type(fit_loop.epoch_loop).advance)
    assert "restarted_mid_evaluation" in advance
    if "_broadcast_sigterm_tensor" in advance:
        assert callable(fit_loop.epoch_loop._broadcast_sigterm_tensor)


@pytest.mark.filterwarnings("ignore")
def test_counts_are_those_of_lightnings_own_state() -> None:
    """What is read in microseconds has every number of the loops' own state, and comes back."""
    from spotguard.integrations.lightning.private_names import LoopCounters

    made, other = trainer(), trainer()
    counters = LoopCounters(made)
    for at, (_, held, key) in enumerate(counters._places):
        held[key] = at

    def numbers(tree: Any) -> list[int]:
        if isinstance(tree, dict):
            return [number for value in tree.values() for number in numbers(value)]
        return [int(tree)]

    assert sorted(counters.read()) == sorted(numbers(made.fit_loop.state_dict()))
    LoopCounters(other).write(counters.names, counters.read())
    assert other.fit_loop.state_dict() == made.fit_loop.state_dict()


@pytest.mark.filterwarnings("ignore")
def test_a_boundary_is_held_as_it_was() -> None:
    """What is kept of one stays as it is while Lightning counts on, and metrics are logged."""
    from spotguard.integrations.lightning import state
    from spotguard.integrations.lightning.private_names import LoopCounters

    made = trainer()
    place = state.LoopPlace(made, LoopCounters(made))
    metrics = state.LoggedMetrics(made)
    made._logger_connector._callback_metrics["loss"] = torch.tensor(0.5)
    metrics.keep()
    expected = place.state_dict(), metrics.state_dict()
    held = place.hold_state(), metrics.hold_state()
    made.fit_loop.epoch_loop._batches_that_stepped += 1
    made.fit_loop.epoch_progress.total.ready += 1
    made._logger_connector._callback_metrics["loss"] = torch.tensor(0.25)
    metrics.keep()
    assert tuple(later() for later in held) == expected
    assert (place.state_dict(), metrics.state_dict()) != expected


@pytest.mark.filterwarnings("ignore")
def test_hooks_that_do_nothing_are_passed_over() -> None:
    """Lightning asks no idle hook of each batch; one that a class of the script has is called."""
    from lightning.pytorch.demos.boring_classes import BoringModel

    from spotguard.integrations.lightning.private_names import pass_over_idle_hooks

    class Own(pl.Callback):  # type: ignore[name-defined,misc]
        ended = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.ended += 1

    callback = Own()
    pass_over_idle_hooks(callback)
    assert callback.on_train_batch_start is None
    trainer(max_steps=3, callbacks=[callback], limit_val_batches=0).fit(BoringModel())
    assert callback.ended == 3


@pytest.mark.filterwarnings("ignore")
def test_hooks_see_the_weights_if_they_ask() -> None:
    """They are asked after each step; a model's `state_dict` is made only where one looks at it."""
    from spotguard.integrations.lightning.state import HookStates

    class Module(pl.LightningModule):  # type: ignore[name-defined,misc]
        made = 0
        looks = False

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            self.made += 1
            return {"weight": 1}

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = checkpoint["epoch"]
            assert "state_dict" in checkpoint
            assert checkpoint.get("nothing", 2) == 2
            if self.looks:
                checkpoint["copy"] = checkpoint.pop("state_dict")["weight"]

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert checkpoint["state_dict"] == {"weight": 1}
            self.loaded = checkpoint["mine"]

    fit, module = trainer(), Module()
    fit.strategy.connect(module)
    states = HookStates(fit, module)
    assert states.are_there
    assert states.state_dict() == {"mine": 0}
    assert module.made == 0
    module.looks = True
    assert states.state_dict() == {"mine": 0, "copy": 1}
    states.load_state_dict({"mine": 5})
    assert module.loaded == 5


@pytest.mark.filterwarnings("ignore")
def test_averaged_weights_come_back() -> None:
    """Lightning's averaging callback puts them into the weights' place, and nowhere else."""
    from lightning.pytorch.demos.boring_classes import BoringModel

    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
    from spotguard.integrations.lightning.state import HookStates

    def set_up(fill: float) -> tuple[Any, Any, HookStates]:
        callback, module = averaging.EMAWeightAveraging(), BoringModel()
        fit = trainer(callbacks=[callback])
        fit.strategy.connect(module)
        callback.setup(fit, module, "fit")
        for parameter in callback._average_model.module.parameters():
            parameter.data.fill_(fill)
        return callback, module, HookStates(fit, module)

    _, module, states = set_up(3.0)
    kept = copy.deepcopy(states.state_dict())
    again, other, states = set_up(0.0)
    states.load_state_dict(kept)
    assert {float(x) for p in again._average_model.module.parameters() for x in p.flatten()} == {
        3.0
    }
    for mine, theirs in zip(other.parameters(), module.parameters(), strict=True):
        assert torch.equal(mine, theirs), "and the raw ones are the module's"


@pytest.mark.filterwarnings("ignore")
def test_a_strategy_keeps_its_class() -> None:
    """The strategy trains on our steps and is still of the script's class; others are refused."""
    from lightning.pytorch.strategies import FSDPStrategy, SingleDeviceStrategy

    from spotguard.integrations.lightning.strategy import extend

    strategy: Any = SingleDeviceStrategy("cpu")
    for _ in range(2):
        extend(strategy, "a fit")  # type: ignore[arg-type]
    assert isinstance(strategy, SingleDeviceStrategy)
    assert type(strategy).__name__ == "SingleDeviceStrategy"
    assert strategy.spotguard == "a fit"
    with pytest.raises(UsageError, match="FSDPStrategy"):
        extend(FSDPStrategy(), "a fit")  # type: ignore[arg-type]


def test_a_part_of_each_epoch() -> None:
    """A limited epoch is the first part of its order: of another one each epoch, or of the same."""
    order = FirstOfEpoch(10, 4, seed=1)
    drawn = []
    for epoch in (0, 1, 0):
        order.set_epoch(epoch)
        drawn.append(list(order))
    assert drawn[0] == drawn[2] != drawn[1]
    assert all(len(set(each)) == 4 for each in drawn)
    assert list(FirstOfEpoch(10, 4, seed=None)) == [0, 1, 2, 3]


def test_the_frozen_base_of_an_adapted_model_is_stored_once() -> None:
    """A module that holds a model with PEFT's adapters is tracked without its frozen weights."""
    from spotguard.runtime.state.tracked import TrackedModule

    class Module(pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self, **adapters: Any) -> None:
            super().__init__()
            self.model = torch.nn.Linear(2, 2).requires_grad_(False)
            self.model.peft_config = adapters  # type: ignore[assignment]

    assert len(list(TrackedModule(Module(default="lora")).frozen_addresses())) == 2
    assert not list(TrackedModule(Module()).frozen_addresses())
