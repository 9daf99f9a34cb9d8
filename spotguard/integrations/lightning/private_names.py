"""All names of Lightning's that are not public, and what is done with them.

Each is used here alone, and a contract test looks for all of them in the installed version.

A checkpoint of ours is restored before Lightning's loop begins, so that its hooks see the right
epoch; what Lightning then counts on its way to the next batch is put right at the very place where
the checkpoint was taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.trainer import call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning.pytorch import Trainer

_Counts = tuple[str, dict[str, Any], tuple[str, ...]]
_OF_EPOCHS = "fit_loop.epoch_progress."
_HOOKS_OF_A_BATCH = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step"),
)


class LoopCounters:
    """Lightning's counts of epochs, batches and optimizer steps, read in microseconds.

    The `state_dict()` of its loops has the same numbers, and takes 200 microseconds.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._fit_loop: Any = trainer.fit_loop
        self._epoch_loop: Any = trainer.fit_loop.epoch_loop
        self._counts = list(_counts_of("fit_loop", self._fit_loop))
        self._places = [(name, held, key) for name, held, keys in self._counts for key in keys]
        self.names = json.dumps([f"{name}.{key}" for name, _, key in self._places])
        """What `read` returns the numbers of, in their order."""

    def read(self, *, of_open_epoch: bool = False) -> list[int]:
        """Return the counts.

        `of_open_epoch`: as they were before the epoch's end, which then comes again.
        """
        found: list[int] = []
        for _, held, keys in self._counts:  # each step reads them: this way in 2 microseconds
            found.extend(map(held.__getitem__, keys))
        if of_open_epoch:
            for number, (name, held, key) in enumerate(self._places):
                if _is_end_of_epoch(name, key):
                    found[number] = min(found[number], held["started"] - 1)
        found.append(self._epoch_loop._batches_that_stepped)
        return found

    def write(self, names: str, counts: list[int]) -> None:
        """Put the counts back; those of another version that are not here are left out."""
        stored = dict(zip(json.loads(names), counts, strict=False))
        for name, held, key in self._places:
            held[key] = stored.get(f"{name}.{key}", held[key])
        self._epoch_loop._batches_that_stepped = counts[-1]

    def open_epoch(self) -> None:
        """Have Lightning go on in the epoch that it took for over when it came to `max_steps`."""
        for name, held, key in self._places:
            if _is_end_of_epoch(name, key):
                held[key] = min(held[key], held["started"] - 1)

    def restart(self, *, in_validation: bool) -> None:
        """Have Lightning go on in the middle of an epoch; in the validation after its last batch.

        It then begins that validation anew, whose counts of batches `write` puts right again.
        """
        if in_validation:
            total = self._fit_loop.epoch_loop.val_loop.batch_progress.total
            total.ready = total.started = total.processed + 1
            total.completed = total.processed
        self._fit_loop.restarting = True

    def arrive(self) -> None:
        """Have the loop over epochs take the place as reached; it would after the whole epoch.

        Until then it steps no schedule at an epoch's end. The loops within it, to which its
        setter would pass this on, find out by themselves.
        """
        self._fit_loop._restarting = False


def _is_end_of_epoch(name: str, key: str) -> bool:
    return name.startswith(_OF_EPOCHS) and key in ("processed", "completed")


def _counts_of(name: str, thing: Any) -> Iterator[_Counts]:
    """Yield the name, the attributes and the names of the numbers of each count below a loop."""
    for key, value in vars(thing).items():
        if dataclasses.is_dataclass(value) and hasattr(value, "load_state_dict"):
            held = vars(value)
            numbers = tuple(k for k, v in held.items() if isinstance(v, int))
            if numbers:
                yield f"{name}.{key}", held, numbers
            yield from _counts_of(f"{name}.{key}", value)
        elif hasattr(value, "on_iteration_done"):
            yield from _counts_of(f"{name}.{key}", value)


class TrainSource:
    """Stands where Lightning asks for the training data, and gives it another loader."""

    def __init__(self, source: Any, replaced: Callable[[Any], Any]) -> None:
        self._source = source
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def dataloader(self) -> Any:
        """Return the loader that takes the place of the script's own."""
        return self._replaced(self._source.dataloader())


def replace_train_loader(trainer: Trainer, replaced: Callable[[Any], Any]) -> None:
    """Have the Trainer train on what `replaced` returns for the script's own loader."""
    fit_loop: Any = trainer.fit_loop
    source = fit_loop._data_source
    if isinstance(source, TrainSource):
        source = source._source
    fit_loop._data_source = TrainSource(source, replaced)


def leave_signals_alone(trainer: Trainer) -> None:
    """Have Lightning send no word of SIGTERM around before each batch: all ranks agree already.

    Its own word is a collective that hangs where a rank is gone.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    if hasattr(loop, "_broadcast_sigterm_tensor"):  # since 2.6
        loop._broadcast_sigterm_tensor = lambda: None


def pass_over_idle_hooks(callback: Callback) -> None:
    """Have Lightning call none of the hooks of each batch that `callback` leaves as they are.

    It enters its profiler for each hook of each callback, whatever that does, and builds a name
    for it: 4 microseconds each. What cannot be called it passes over.
    """
    for hook in _HOOKS_OF_A_BATCH:
        own = hook in vars(callback)  # a class may give its instances some
        if not own and getattr(type(callback), hook, None) is getattr(Callback, hook, None):
            setattr(callback, hook, None)


def put_back_metrics(trainer: Trainer, metrics: dict[str, float]) -> None:
    """Give the Trainer's callbacks the metrics that they would still see without the resume."""
    hub: Any = trainer._logger_connector
    hub._callback_metrics.update({name: torch.tensor(v) for name, v in metrics.items()})


@contextlib.contextmanager
def logged_in_no_mean(trainer: Trainer) -> Iterator[None]:
    """Within it, what `self.log` gets counts in no mean over the epoch; it is logged all the same.

    It must be logged: with `sync_dist` each call of `self.log` waits for the other ranks.
    """
    results: Any = trainer._results
    results._extract_batch_size = lambda *_: 0  # by which a mean weights the value
    try:
        yield
    finally:
        del results._extract_batch_size


def train_on(trainer: Trainer, batch: Any, *rest: Any) -> Any:
    """Return what `training_step` gives for a further micro-batch of a step.

    The batch takes the way that the Trainer gives each batch: to the device, and through the
    strategy, with `self.log` weighting by the batch's size.
    """
    module: Any = trainer.lightning_module
    hub: Any = trainer._logger_connector
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
    hub.on_batch_start(batch)
    # `self.log` asks for the name of the hook under way, which is `backward` here.
    return call._call_strategy_hook(trainer, "training_step", batch, *rest)
