"""What a Trainer knows beside its weights, optimizer and schedule, as part of the saved state."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.trainer_callback import ExportableState

from spotguard.checkpoint.strict_json import dumps, loads
from spotguard.errors import StateMismatch
from spotguard.runtime.state.frozen import NotPlainError, TooLargeError, frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_IN_A_PAGE = 64
_LARGEST_BYTES = 4 << 20
"""Of callbacks' tensors; more would slow each step."""
_OF_THE_STATE = ("epoch", "global_step", "num_input_tokens_seen", "best_global_step")
_PROMISED = ("loss", "grad_norm", "learning_rate", "epoch", "step", "train_loss", "eval_loss")
"""What the Trainer itself logs of the training, without times."""
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate")
FLAGS = (*_FLAGS, "should_log")
"""What callbacks ask the Trainer for at the end of a step."""


class Pending(NamedTuple):
    """What the Trainer does after a step: log, evaluate, save; a resume from there does it."""

    flags: dict[str, bool]
    grad_norm: torch.Tensor | float | None
    """A tensor stays one until it is logged: to read it waits for the device."""
    learning_rate: float | None


class TrainerProgress:
    """The Trainer's own state at a step boundary. Tracked; it is the same on all ranks."""

    holds_parameters = False
    """It is no object of the script's that might save weights in its own way."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._ranks: int = trainer.args.world_size
        self._history = History()
        self._earlier_s = 0.0
        self._began_at: float | None = None
        self._losses: dict[str, Any] | None = None
        self.epochs_done = 0
        """Epochs whose end, with its evaluation, is past."""
        self.steps_in_epoch = 0
        """Steps done of the epoch under way."""
        self.planned_steps: int | None = None
        """How many steps the training was to have in all; None before this was saved."""
        self.pending: Pending | None = None
        """What follows the step that ended last, until the next one begins."""

    @property
    def earlier_s(self) -> float:
        """Seconds that earlier attempts trained, up to what this one resumed from."""
        return self._earlier_s

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values."""
        return self._held(lambda state: state)()

    def hold_state(self) -> Callable[[], dict[str, Any]] | None:
        """Return what gives the state of this moment, at any later one; None if nothing can.

        This is done at each step, so what the Trainer only adds to is not looked at yet.
        """
        try:
            return self._held(partial(frozen, most_bytes=_LARGEST_BYTES))
        except (NotPlainError, TooLargeError):  # a callback's
            return None

    def comparable_state(self) -> dict[str, Any]:
        """Return the state without what is the machine's, such as times, or not promised."""
        state = self.state_dict()
        left_out = ("trained_s", "total_flos", "log_history")
        return {
            **{k: v for k, v in state.items() if k not in left_out},
            "logged": self._logged(lambda name: name in _PROMISED),
        }

    def not_promised(self) -> dict[str, Any]:
        """Return what a resume may not keep, as the documentation says.

        `total_flos` is summed over the ranks at each log only. What a subclass counts for itself
        and logs, such as TRL's tokens and their mean accuracy, is in attributes of its own.
        """
        logged = self._logged(lambda name: name not in _PROMISED and not _of_time(name))
        names = dict.fromkeys(name for entry in logged for name in entry)
        return {
            "total_flos": float(self._trainer.state.total_flos),
            **{name: [entry.get(name) for entry in logged] for name in names},
        }

    def _logged(self, is_wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
        history = self._trainer.state.log_history
        return [{k: _plain(v) for k, v in entry.items() if is_wanted(k)} for entry in history]

    def _held(self, copied: Callable[[Any], Any]) -> Callable[[], dict[str, Any]]:
        trainer = self._trainer
        state = trainer.state
        named = [getattr(state, name) for name in _OF_THE_STATE]
        best = state.best_metric, state.best_model_checkpoint
        flops = float(state.total_flos + trainer.current_flos * self._ranks)
        history, logged = state.log_history, len(state.log_history)
        losses = self._sums()
        callbacks = [[name, copied(it.state())] for name, it in _stateful(trainer)]
        epochs_done, steps_in_epoch, pending = self.epochs_done, self.steps_in_epoch, self.pending
        planned = int(state.max_steps)
        spent_s = 0.0 if self._began_at is None else time.monotonic() - self._began_at

        def whole() -> dict[str, Any]:
            return {
                **dict(zip(_OF_THE_STATE, named, strict=True)),
                "best_metric": None if best[0] is None else float(best[0]),
                "best_model_checkpoint": best[1],
                "total_flos": flops,
                "log_history": self._history.pages(history[:logged]),
                "losses": losses,
                "callbacks": callbacks,
                "epochs_done": epochs_done,
                "steps_in_epoch": steps_in_epoch,
                "planned_steps": planned,
                "pending": None if pending is None else pending._asdict(),
                "trained_s": self._earlier_s + spent_s,
            }

        return whole

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        """Go to where `state_dict` was returned.

        Raises:
            StateMismatch: it is not what `state_dict` returned.
        """
        state = self._trainer.state
        try:
            for name in (*_OF_THE_STATE, "best_metric", "best_model_checkpoint", "total_flos"):
                setattr(state, name, stored[name])
            state.log_history = self._history.restore(stored["log_history"])
            self._losses = dict(stored["losses"])
            self._restore_callbacks(stored["callbacks"])
            self.epochs_done, self.steps_in_epoch = stored["epochs_done"], stored["steps_in_epoch"]
            self.planned_steps = stored.get("planned_steps")  # earlier versions did not save it
            self.pending = None if stored["pending"] is None else Pending(**stored["pending"])
            self._earlier_s = float(stored["trained_s"])
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise StateMismatch(
                f"the Trainer's state in the checkpoint cannot be understood: {problem!r}"
            ) from problem
        best = state.best_model_checkpoint
        if best is not None and not Path(best).is_dir():
            state.best_model_checkpoint = None  # of another machine; the run's own best one stays

    def go_on(self, done: int, steps_per_epoch: int) -> None:
        """Take `done` steps for a place within a longer training: nothing has ended there.

        The last epoch of the shorter one may have been cut, and its Trainer was told to stop.
        """
        self.epochs_done, self.steps_in_epoch = divmod(done, steps_per_epoch)
        if self.pending is not None:
            stop = ("should_training_stop", "should_epoch_stop")
            flags = {n: is_set and n not in stop for n, is_set in self.pending.flags.items()}
            self.pending = self.pending._replace(flags=flags)

    def reschedule(self) -> str:
        """Set the learning rates by a schedule that is a function of the step; return what to say.

        What was restored is the rate that the shorter schedule had there, such as 0 at its end.
        """
        scheduler = self._trainer.lr_scheduler
        if not isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            return f"its {type(scheduler).__name__} goes on as it was then"
        step, before = scheduler.last_epoch, scheduler.get_last_lr()
        pairs = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        rates = [base * rate(step) for base, rate in pairs]
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler._last_lr = rates
        if rates == before:
            return "its learning rates are those that it would have had from the start"
        return (
            "learning rates from here on are those of the longer schedule, but the steps before "
            "had those of the shorter one"
        )

    def train_begins(self) -> None:
        """Give the Trainer back its sums of losses, which it has just set to 0."""
        self._began_at = time.monotonic()
        if self._losses is not None:
            self._set_sums(self._losses)
            self._losses = None

    def _sums(self) -> dict[str, Any]:
        """Return the sums that what is logged is computed from."""
        if self._losses is not None or self._began_at is None:
            return dict(self._losses or {})
        trainer = self._trainer
        return {
            "since_logged": trainer._tr_loss.clone(),
            "until_logged": float(trainer._total_loss_scalar),
            "logged_at_step": trainer._globalstep_last_logged,
        }

    def _set_sums(self, losses: dict[str, Any]) -> None:
        trainer = self._trainer
        since: Any = losses.get("since_logged")
        if isinstance(since, torch.Tensor):
            trainer._tr_loss = since.to(trainer.args.device)
            trainer._total_loss_scalar = losses["until_logged"]
            trainer._globalstep_last_logged = losses["logged_at_step"]
            trainer._initial_global_step = 0  # the mean loss is that of the whole run

    def _restore_callbacks(self, stored: Sequence[Any]) -> None:
        waiting = list(_stateful(self._trainer))
        for name, state in stored:
            found = next((pair for pair in waiting if pair[0] == name), None)
            if found is None:
                continue  # the script has it no more
            waiting.remove(found)
            for attribute, value in state["attributes"].items():
                setattr(found[1], attribute, value)


def _stateful(trainer: Any) -> list[tuple[str, Any]]:
    """Return the callbacks that have a state, each with the name of its class."""
    callbacks = trainer.callback_handler.callbacks
    return [(type(it).__name__, it) for it in callbacks if isinstance(it, ExportableState)]


class History:
    """What the Trainer has logged: written once, in pages, however often it is saved."""

    def __init__(self) -> None:
        self._entries: list[str] = []
        self._full: list[str] = []
        self._rest = ""
        self._lock = threading.Lock()
        """A rank that is left alone saves in another thread."""

    def pages(self, entries: list[dict[str, Any]]) -> list[str]:
        """Return `entries`, to which more are added only at the end, as few JSON texts."""
        with self._lock:
            return self._pages(entries)

    def _pages(self, entries: list[dict[str, Any]]) -> list[str]:
        if len(entries) < len(self._entries):  # somebody began another list
            self._entries, self._full = [], []
        if len(entries) > len(self._entries):
            self._entries += map(_entry, entries[len(self._entries) :])
            while len(self._entries) - len(self._full) * _IN_A_PAGE >= _IN_A_PAGE:
                self._full.append(_page(self._entries[len(self._full) * _IN_A_PAGE :][:_IN_A_PAGE]))
            self._rest = _page(self._entries[len(self._full) * _IN_A_PAGE :])
        return [*self._full, self._rest]

    def restore(self, pages: list[str]) -> list[dict[str, Any]]:
        """Return what `pages` was given."""
        self._entries, self._full, self._rest = [], [], ""
        entries: list[dict[str, Any]] = []
        for page in filter(None, pages):
            entries += loads(page.encode(), what="the Trainer's log history")
        return entries


def _of_time(name: str) -> bool:
    return any(word in name for word in ("runtime", "per_second", "flos"))


def _entry(entry: dict[str, Any]) -> str:
    plain = {key: _plain(value) for key, value in entry.items()}
    return dumps(plain, what="the Trainer's log history").decode()


def _page(entries: list[str]) -> str:
    return f"[{','.join(entries)}]" if entries else ""


def _plain(value: Any) -> Any:
    """Return a logged value as JSON has it: callbacks and metrics may log anything."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)
