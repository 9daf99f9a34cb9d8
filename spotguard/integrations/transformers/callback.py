"""The one line: a callback, or a call, that makes a Trainer survive."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback

import spotguard.runtime as spotguard
from spotguard.errors import UsageError
from spotguard.integrations.transformers.refusals import refuse_unsupported
from spotguard.integrations.transformers.surviving_trainer import survive
from spotguard.integrations.transformers.trainer_run import TrainerRun
from spotguard.runtime.process.surroundings import tell_uncaught_in_a_sentence

if TYPE_CHECKING:
    from spotguard.runtime import Run


class SpotguardCallback(TrainerCallback):
    """Makes the Trainer survive that it is given to, in `Trainer(..., callbacks=[...])`.

    Args:
        run: From `spotguard.init(...)`, for settings of your own. By default this calls `init`,
            with the seed of the training arguments (`data_seed`, else `seed`).
        global_batch_size: Samples per optimizer step over all ranks, a fixed number for the run.
            By default what the arguments make of the ranks that the run began with:
            `per_device_train_batch_size * gradient_accumulation_steps * ranks`.
    """

    def __init__(self, run: Run | None = None, *, global_batch_size: int | None = None) -> None:
        self._run = run
        self._global_batch_size = global_batch_size
        self._of: TrainerRun | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take over the Trainer that is being made."""
        self.take_over(_trainer_of(args))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Go on with what the Trainer has just set to its beginning.

        Raises:
            UsageError: the callback was added to a Trainer that was made already.
        """
        if self._of is None:
            tell_uncaught_in_a_sentence()
            raise UsageError(
                "SpotguardCallback was added to a Trainer that was made already",
                hint="pass it in Trainer(..., callbacks=[SpotguardCallback()]), or call "
                "spotguard.integrations.transformers.attach(trainer) before trainer.train()",
            )
        self._of.train_begins()

    def take_over(self, trainer: Trainer) -> None:
        """Make `trainer` survive.

        Raises:
            UsageError: it cannot; the message says why.
        """
        if hasattr(trainer, "_spotguard"):
            raise UsageError(
                "this Trainer has spotguard already",
                hint="use either SpotguardCallback or attach, once",
            )
        args = trainer.args
        seed = args.seed if args.data_seed is None else args.data_seed
        run = self._run or spotguard.init(seed=seed)
        refuse_unsupported(trainer)  # now that a refusal is told in one sentence
        self._of = TrainerRun(trainer, run, global_batch_size=self._global_batch_size)
        survive(trainer, self._of)


def attach(
    trainer: Trainer, run: Run | None = None, *, global_batch_size: int | None = None
) -> None:
    """Make a Trainer survive that is made already; call it before `trainer.train()`.

    Args:
        trainer: Of `transformers.Trainer` or a subclass.
        run: As for `SpotguardCallback`.
        global_batch_size: As for `SpotguardCallback`.

    Raises:
        UsageError: the Trainer cannot survive; the message says why.
    """
    if not isinstance(trainer, Trainer):
        raise UsageError(f"attach needs a transformers.Trainer, not a {type(trainer).__name__}")
    callback = SpotguardCallback(run, global_batch_size=global_batch_size)
    callback.take_over(trainer)
    trainer.add_callback(callback)


def _trainer_of(args: Any) -> Trainer:
    """Return the Trainer that is being made with `args`, among the callers of this function."""
    frame = sys._getframe(1)
    while frame is not None:
        maker = frame.f_locals.get("self")
        if isinstance(maker, Trainer) and maker.args is args:
            return maker
        frame = frame.f_back  # type: ignore[assignment]
    raise UsageError(
        "SpotguardCallback does not see the Trainer that it was given to",
        hint="call spotguard.integrations.transformers.attach(trainer) after it was made",
    )
