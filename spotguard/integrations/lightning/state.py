"""What belongs to the training state of a Trainer, beside modules, optimizers and schedulers."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from spotguard.integrations.lightning.private_names import put_back_metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.integrations.lightning.private_names import LoopCounters

STEP, VALIDATION, EPOCH_END, END = "step", "validation", "epoch_end", "end"
"""Where in Lightning's loop a boundary lies: what of it comes next."""
_WEIGHTS = "state_dict"


class LoopPlace:
    """Where Lightning's loop stands: its counts, and what comes next."""

    def __init__(self, trainer: pl.Trainer, counters: LoopCounters) -> None:
        self._trainer = trainer
        self._counters = counters
        self.next = END
        self.steps_per_epoch = 0
        self.resumed: dict[str, Any] = {}
        """What this attempt began with; empty once that is all in its place again."""

    def state_dict(self) -> dict[str, Any]:
        """Return the place as plain values."""
        return {
            "next": self.next,
            "names": self._counters.names,
            "counts": self._counters.read(of_open_epoch=self.next == EPOCH_END),
            "should_stop": self._trainer.should_stop,
        }

    def hold_state(self) -> Callable[[], dict[str, Any]]:
        """Return what gives the place of this moment later: nobody changes what was read."""
        state = self.state_dict()
        return lambda: state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Have Lightning go on from the place."""
        self.resumed = dict(state)
        self._trainer.should_stop = state["should_stop"]
        self._counters.write(state["names"], state["counts"])
        if state["next"] != END:
            self._counters.restart(in_validation=state["next"] == VALIDATION)

    def go_on(self) -> None:
        """Have Lightning train on where the run had ended: it is given more steps than before.

        What had stopped the Trainer may do so again. An epoch that was cut is read to its end.
        """
        trainer = self._trainer
        if self.resumed.get("next") != END or 0 <= trainer.max_steps <= trainer.global_step:
            return
        trainer.should_stop = False
        if trainer.fit_loop.batch_idx + 1 < self.steps_per_epoch:
            self._counters.open_epoch()
            self.resumed |= {"next": STEP, "counts": self._counters.read()}
            self._counters.restart(in_validation=False)

    def settle(self, at: str) -> None:
        """Put right what Lightning has counted on its way to the very place of the checkpoint."""
        resumed, self.resumed = self.resumed, {}
        if resumed:
            self._counters.arrive()
        if resumed.get("next") == at:
            self._counters.write(resumed["names"], resumed["counts"])


class LoggedMetrics:
    """What was logged at the last validation, for callbacks that ask later."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._kept: dict[str, float] = {}

    def keep(self) -> None:
        """Keep the metrics as they are now."""
        self._kept = {name: float(value) for name, value in self._trainer.callback_metrics.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return dict(self._kept)

    def hold_state(self) -> Callable[[], dict[str, Any]]:
        """Return what gives the numbers of this moment later: `keep` puts others in their place."""
        kept = self._kept
        return lambda: dict(kept)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the Trainer the numbers."""
        self._kept = dict(state)
        put_back_metrics(self._trainer, self._kept)


class Plateaus:
    """Schedules that follow a metric, which Lightning steps once more on its way to the place."""

    def __init__(self, trainer: pl.Trainer) -> None:
        configs = [c for c in trainer.lr_scheduler_configs if c.reduce_on_plateau]
        self._schedulers = [config.scheduler for config in configs]
        self._kept: list[tuple[Any, list[Any]]] = []

    def keep(self) -> None:
        """Keep them as they are."""
        self._kept = [
            (copy.deepcopy(s.state_dict()), [group["lr"] for group in s.optimizer.param_groups])
            for s in self._schedulers
        ]

    def put_back(self) -> None:
        """Put them back to what was kept, if anything was."""
        kept, self._kept = self._kept, []
        for scheduler, (state, rates) in zip(self._schedulers, kept, strict=False):
            scheduler.load_state_dict(state)
            for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate


class CallbackStates:
    """The states of the Trainer's callbacks, by their keys."""

    def __init__(self, callbacks: list[pl.Callback]) -> None:
        self._callbacks = [each for each in callbacks if _keeps_state(each)]

    def state_dict(self) -> dict[str, Any]:
        """Return all states that are not empty."""
        states = {each.state_key: each.state_dict() for each in self._callbacks}
        return {key: dict(state) for key, state in states.items() if state}

    def hold_state(self) -> Callable[[], dict[str, Any]] | None:
        """Return what gives the states of this moment later, where no callback has one."""
        return None if self._callbacks else dict

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give each callback its state; one that is new keeps its own."""
        for callback in self._callbacks:
            if callback.state_key in state:
                callback.load_state_dict(state[callback.state_key])


class HookStates:
    """What hooks of the script put into a checkpoint, by `on_save_checkpoint`."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._trainer = trainer
        self._module = module
        self._callbacks = [
            each
            for each in trainer.callbacks  # type: ignore[attr-defined]
            if type(each).on_save_checkpoint is not pl.Callback.on_save_checkpoint
        ]
        self._asks_module = (
            type(module).on_save_checkpoint is not pl.LightningModule.on_save_checkpoint
        )

    @property
    def are_there(self) -> bool:
        """True if there is such a hook."""
        return self._asks_module or bool(self._callbacks)

    def state_dict(self) -> dict[str, Any]:
        """Return what the hooks added to what is in each checkpoint of Lightning's."""
        checkpoint = _Checkpoint(self._trainer, self._module)
        for callback in self._callbacks:
            callback.on_save_checkpoint(self._trainer, self._module, checkpoint)
        if self._asks_module:
            self._module.on_save_checkpoint(checkpoint)
        return checkpoint.added()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the hooks a checkpoint with what they had added."""
        checkpoint = {**_Checkpoint(self._trainer, self._module).whole(), **state}
        for callback in self._callbacks:
            callback.on_load_checkpoint(self._trainer, self._module, checkpoint)
        if self._asks_module:
            self._module.on_load_checkpoint(checkpoint)


class _Checkpoint(dict[str, Any]):
    """What a hook is shown of Lightning's checkpoint; the weights come once they are asked for.

    The hooks are asked after each step, and a large model's `state_dict` takes a millisecond.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        super().__init__()
        self["epoch"] = trainer.current_epoch
        self["global_step"] = trainer.global_step
        self["pytorch-lightning_version"] = pl.__version__
        self._module = module
        self._usual = frozenset(self)
        self._weights: dict[str, Any] | None = None

    def __missing__(self, key: str) -> Any:
        if key != _WEIGHTS:
            raise KeyError(key)
        self[_WEIGHTS] = self._weights = dict(self._module.state_dict())
        return self[_WEIGHTS]

    def __contains__(self, key: object) -> bool:
        return key == _WEIGHTS or super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return what is under `key`, the weights too."""
        try:
            return self[key]
        except KeyError:
            return default

    def pop(self, key: str, *default: Any) -> Any:
        """Take out what is under `key`, the weights too."""
        self.get(key)
        return super().pop(key, *default)

    def whole(self) -> dict[str, Any]:
        """Return all of it, with the weights."""
        return {**self, _WEIGHTS: self[_WEIGHTS]}

    def added(self) -> dict[str, Any]:
        """Return what hooks have put in beside what is there as ever, or in the weights' place.

        As Lightning's `WeightAveraging` does, whose average is nowhere else.
        """
        return {
            key: value
            for key, value in self.items()
            if key not in self._usual and (key != _WEIGHTS or value is not self._weights)
        }


def _keeps_state(callback: pl.Callback) -> bool:
    return type(callback).state_dict is not pl.Callback.state_dict
