"""Ways to break the runtime on purpose: the property test must find each of them."""

from __future__ import annotations

import os
import random
from collections import Counter
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from spotguard.events.states import EndReason
from spotguard.runtime.checkpoint.saver import Saver
from spotguard.runtime.checkpoint.training_state import Keeper
from spotguard.runtime.data.loader import ElasticLoader
from spotguard.runtime.data.streaming import Stream
from spotguard.runtime.loop.training import Training
from spotguard.runtime.preemption.stop_consensus import StopWatch
from spotguard.runtime.state.best import BestState
from spotguard.runtime.state.tracked import (
    RandomGenerator,
    TrackedModule,
    TrackedStateful,
    TrackedValue,
)
from spotguard.runtime.state.tracked_optimizer import TrackedOptimizer
from spotguard.storage.remote.store import RemoteStore

if TYPE_CHECKING:
    from collections.abc import Callable


_step: Any = import_module("spotguard.runtime.step")
_restoring: Any = import_module("spotguard.runtime.checkpoint.restore")
_keeper: Any = Keeper
_watch: Any = StopWatch


def _then(owner: Any, change: Callable[[Any], object]) -> None:
    """Have `change` called with the object's value whenever its state was restored."""
    restore = owner.restore

    def broken(self: Any, name: str, tree: Any, reading: Any) -> Callable[[], None]:
        finish = restore(self, name, tree, reading)

        def finish_and_break() -> None:
            finish()
            change(self.value)

        return finish_and_break

    owner.restore = broken


def _generator_forgotten() -> None:
    RandomGenerator.restore = lambda *_: lambda: None  # type: ignore[method-assign]


def _dict_forgotten() -> None:
    whole = TrackedValue.restore

    def broken(self: Any, name: str, tree: Any, reading: Any) -> Callable[[], None]:
        finish = whole(self, name, tree, reading)
        return (lambda: None) if isinstance(self.value, dict) else finish

    TrackedValue.restore = broken  # type: ignore[method-assign]


def _momentum_forgotten() -> None:
    def zero(optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            for name in ("momentum_buffer", "exp_avg"):
                if isinstance(state.get(name), torch.Tensor):
                    state[name].zero_()

    _then(TrackedOptimizer, zero)


def _rate_forgotten() -> None:
    def back(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group.get("initial_lr", group["lr"])

    _then(TrackedOptimizer, back)


def _schedule_off_by_one() -> None:
    def on(value: Any) -> None:
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            value.last_epoch += 1

    _then(TrackedStateful, on)


def _buffers_forgotten() -> None:
    def zero(module: torch.nn.Module) -> None:
        for buffer in module.buffers():
            buffer.zero_()

    _then(TrackedModule, zero)


def _sample_skipped() -> None:
    """The first step after a resume trains on the samples of the one after it."""
    shares, read = ElasticLoader.shares, ElasticLoader.read
    first: dict[int, int] = {}

    def reads(self: ElasticLoader, first_step: int, last_step: int) -> Any:
        first[id(self)] = first_step
        return read(self, first_step, last_step)

    def shifted(self: ElasticLoader, step: int) -> Any:
        begins = first.get(id(self), 0)
        return shares(self, step + 1 if begins and step == begins else step)

    ElasticLoader.read = reads  # type: ignore[method-assign]
    ElasticLoader.shares = shifted  # type: ignore[method-assign]


def _third_micro_batch_weighs_more() -> None:
    weight = _step.loss_weight
    seen: Counter[int] = Counter()

    def broken(share: Any, reduction: str) -> float:
        seen[share.step] += 1
        return float(weight(share, reduction)) * (1.2 if seen[share.step] == 3 else 1.0)

    _step.loss_weight = broken


def _boundary_not_seeded() -> None:
    """What is drawn beside micro-batches follows from nothing after a resume."""
    training: Any = import_module("spotguard.runtime.loop.training")
    training.BOUNDARY = int(os.environ["SPOTGUARD_ATTEMPT"])


def _own_dice_not_restored() -> None:
    _restoring.restore_random = lambda *_: True


def _stream_begins_again() -> None:
    Stream.restore = lambda *_: None  # type: ignore[method-assign]


def _best_forgotten() -> None:
    BestState.of = classmethod(lambda cls, _: cls())  # type: ignore[method-assign,assignment]


def _end_of_epoch_left_out() -> None:
    """What comes at an epoch's end is not done again by the attempt after the one it was cut in."""
    _keeper.begin_at_epoch_end = lambda _: None
    Training.at_epoch_end = property(lambda _: False)  # type: ignore[assignment,method-assign]


def _last_save_left_out() -> None:
    """A job that is told to stop leaves without the save of its last step."""
    Saver.save_now = lambda *_, **__: None  # type: ignore[method-assign]


def _retries_draw_from_the_scripts_dice() -> None:
    tried = RemoteStore._tried

    def broken(self: RemoteStore, call: Callable[[], Any]) -> Any:
        def drawing() -> Any:
            try:
                return call()
            except Exception:
                random.random()
                torch.rand(())
                raise

        return tried(self, drawing)

    RemoteStore._tried = broken  # type: ignore[method-assign]


def _notice_unheard() -> None:
    request = _watch.request

    def broken(self: Any, asked: Any) -> None:
        if asked.reason is not EndReason.PREEMPTED:
            request(self, asked)

    _watch.request = broken


BUGS: dict[str, Callable[[], None]] = {
    "generator": _generator_forgotten,
    "dict": _dict_forgotten,
    "momentum": _momentum_forgotten,
    "rate": _rate_forgotten,
    "schedule": _schedule_off_by_one,
    "buffers": _buffers_forgotten,
    "sample": _sample_skipped,
    "third": _third_micro_batch_weighs_more,
    "seeds": _boundary_not_seeded,
    "dice": _own_dice_not_restored,
    "stream": _stream_begins_again,
    "best": _best_forgotten,
    "epoch-end": _end_of_epoch_left_out,
    "last-save": _last_save_left_out,
    "retries": _retries_draw_from_the_scripts_dice,
    "notice": _notice_unheard,
}


def plant(name: str) -> None:
    """Break it in the way of that name."""
    BUGS[name]()
