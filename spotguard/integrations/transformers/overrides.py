"""What a Trainer's class does in its own way, and whether a resume keeps that right.

Judged is what a class overrides relative to `transformers.Trainer`, never its name: most overrides
are called from where the Trainer's own would be, and see what they would see. Others have a loop of
their own, restore something that only they know of, or keep what they made for steps to come.
"""

from __future__ import annotations

import dis
import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import Trainer

from spotguard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spotguard.runtime import Run

_LOOPS = (
    "train",
    "_inner_training_loop",
    "_run_epoch",
    "_init_training_state",
    "_prepare_for_training",
    "_finalize_training",
)
"""Of these the loop is made: an override must call the Trainer's own, which calls ours."""
_RESTORING = (
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_load_scaler",
    "_load_callback_state",
)
"""They read the Trainer's own folders, which a run of spotguard never resumes from."""
_KEPT = frozenset(
    {
        *_LOOPS,
        *_RESTORING,
        "_load_from_checkpoint",  # the weights
        # made before the loop, or at its end
        "create_accelerator_and_postprocess",
        "create_model_card",
        "create_optimizer",
        "create_optimizer_and_scheduler",
        "create_scheduler",
        "call_model_init",
        "get_decay_parameter_names",
        "get_optimizer_cls_and_kwargs",
        "get_total_train_batch_size",
        "set_initial_training_values",
        "num_examples",
        # data
        "get_train_dataloader",
        "get_eval_dataloader",
        "get_test_dataloader",
        "_get_dataloader",
        "_get_train_sampler",
        "_get_eval_sampler",
        "_get_collator_with_removed_columns",
        "_remove_unused_columns",
        "_set_signature_columns_if_needed",
        # a step
        "get_batch_samples",
        "_get_num_items_in_batch",
        "_prepare_input",
        "_prepare_inputs",
        "training_step",
        "compute_loss",
        "compute_loss_context_manager",
        "autocast_smart_context_manager",
        "floating_point_ops",
        "_clip_grad_norm",
        "_get_grad_norm",
        "_get_learning_rate",
        "_track_num_input_tokens",
        "_wrap_model",
        # what follows a step
        "_maybe_log_save_evaluate",
        "log",
        "store_flos",
        "evaluate",
        "_evaluate",
        "evaluation_loop",
        "predict",
        "prediction_step",
        "_determine_best_metric",
        "_load_best_model",
        "_save",
        "_save_checkpoint",
        "_save_optimizer_and_scheduler",
        "_save_rng_state",
        "_save_scaler",
        "save_model",
        "_get_output_dir",
        # what has nothing to do with the state
        "add_callback",
        "pop_callback",
        "remove_callback",
        "hyperparameter_search",
        "init_hf_repo",
        "is_local_process_zero",
        "is_world_process_zero",
        "push_to_hub",
        "_push_from_checkpoint",
        "_finish_current_push",
        "_validate_args",
        "_build_accelerator_args",
        "_move_model_to_device",
        "get_sp_size",
        "get_cp_size",
        "get_tp_size",
    }
)
OWN_LOOP = "write the loop with spotguard.runtime, as docs/coming-from.md shows"
"""What to do with a Trainer that cannot survive as it is."""
_CHECKED_STEPS = 3


def own_loop(trainer: Any) -> str | None:
    """Return what of its class is a training loop of its own; None if nothing is."""
    kind = script_class(trainer)
    for name in _LOOPS:
        if is_another(kind, name) and not _calls_base(getattr(kind, name), name):
            return f"{kind.__name__}.{name} is a training loop of its own"
    return None


def doubts(trainer: Any) -> Iterator[str]:
    """Yield, in a sentence each, what a resume may not keep: of which nobody knows, or warns."""
    kind = script_class(trainer)
    restoring = [name for name in _RESTORING if is_another(kind, name)]
    if restoring:
        yield (
            f"{kind.__name__}.{restoring[0]} is not called, as the run resumes from its own "
            "checkpoints: what else it would restore begins anew after an interruption (keep plain "
            "values by run.track_values(trainer, 'name'), and attach(trainer, run))"
        )
    unknown = [
        name
        for name, value in vars(Trainer).items()
        if not name.startswith("__") and callable(value) and name not in _KEPT
        if is_another(kind, name)
    ]
    if unknown:
        yield (
            f"{kind.__name__} overrides {', '.join(unknown)} of the Trainer, of which it is not "
            "known whether a resume keeps it right: spotguard drill interrupts a run and tells"
        )


def is_another(kind: type, name: str) -> bool:
    """Return True if a class has a method of its own in the place of the Trainer's."""
    return getattr(kind, name, None) is not getattr(Trainer, name, None)


# ---------------------------------------------------------------------- rollouts


class Rollouts(NamedTuple):
    """A Trainer whose `_prepare_inputs` makes what it trains on, for several micro-batches."""

    accumulation: int
    """Micro-batches of a rank's step, as the arguments say."""
    kept_in: tuple[str, ...]
    """Attributes of the Trainer that hold what was made."""


def rollouts_of(trainer: Any, batch_size: int, accumulation: int, run: Run) -> Rollouts | None:
    """Return how a Trainer makes rollouts; None if it trains on the batches that it is given.

    One does if its `_prepare_inputs` keeps something on the Trainer. Supported is what begins anew
    with each optimizer step: then no checkpoint needs to have any of it.

    Args:
        trainer: Before its class is changed, or after it.
        batch_size: The samples of a batch that its own DataLoader makes.
        accumulation: As the script's arguments have it.
        run: The run that it is part of.

    Raises:
        UsageError: rollouts are used in more than one optimizer step, or it cannot be told.
    """
    kind = script_class(trainer)
    kept_in = tuple(_stored_on_self(kind._prepare_inputs)) if _prepares(kind) else ()
    if not kept_in:
        return None
    size = trainer.args.per_device_train_batch_size
    uses, rest = divmod(batch_size, size)
    repeats = getattr(trainer, "num_iterations", 1)
    problem = None
    if getattr(trainer, "loss_is_scaled_for_ga", None) is None:
        problem = "and does not say by loss_is_scaled_for_ga what its loss is divided by"
        hint = "use a version of its library that says it, or " + OWN_LOOP
    elif rest or repeats != 1 or accumulation % uses:
        problem = "which last for more than one optimizer step: no checkpoint has them"
        hint = (
            "make them anew for each step: num_iterations=1, and steps_per_generation equal to "
            f"gradient_accumulation_steps (now {accumulation})"
        )
    elif run.world_size != run.reference_world_size:
        problem = f"dealt to {run.reference_world_size} ranks when the run began"
        hint = f"resume it on as many ranks, not on {run.world_size}"
    if problem is not None:
        raise UsageError(
            f"this Trainer cannot survive: {kind.__name__}._prepare_inputs keeps what it made "
            f"(rollouts) in {kept_in[0]}, {problem}",
            hint=hint,
        )
    return Rollouts(accumulation, kept_in)


class RolloutCheck:
    """Makes sure, in an attempt's first steps, that each step does make rollouts of its own."""

    def __init__(self, trainer: Any, rollouts: Rollouts) -> None:
        self._trainer = trainer
        self._kept_in = rollouts.kept_in
        self._before: dict[str, Any] | None = None
        self._steps = 0

    def step_began(self) -> None:
        """Look at what is kept before the first micro-batch of a step."""
        if self._steps < _CHECKED_STEPS:
            self._before = {name: getattr(self._trainer, name, None) for name in self._kept_in}

    def trained_once(self) -> None:
        """Compare, after the first micro-batch.

        Raises:
            UsageError: it was trained on what an earlier step had made.
        """
        before, self._before = self._before, None
        if before is None:
            return
        self._steps += 1
        for name, value in before.items():
            if holds_tensors(value) and getattr(self._trainer, name, None) is value:
                raise UsageError(
                    f"{type(self._trainer).__name__} trained a second step on what is in {name}: "
                    "no checkpoint has that",
                    hint="have each optimizer step make its own rollouts",
                )


def holds_tensors(value: Any) -> bool:
    """Return True if a value is a tensor, or a dict or list that has one."""
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict):
        return any(map(holds_tensors, value.values()))
    return isinstance(value, (list, tuple)) and any(map(holds_tensors, value))


def script_class(trainer: Any) -> Any:
    """Return the class that the script made its Trainer of."""
    kind = type(trainer)
    return kind.__mro__[2] if hasattr(trainer, "_spotguard") else kind


def _prepares(kind: type) -> bool:
    return is_another(kind, "_prepare_inputs")


# ---------------------------------------------------------------------- what code does


def _functions(function: Callable[..., Any]) -> Iterator[Any]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    waiting = [] if code is None else [code]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [constant for constant in code.co_consts if hasattr(constant, "co_code")]


def _calls_base(function: Callable[..., Any], name: str) -> bool:
    """Return True if a method calls the one that it overrides, or may do so."""
    codes = list(_functions(function))
    return not codes or any(name in code.co_names for code in codes)


def _stored_on_self(function: Callable[..., Any]) -> Iterator[str]:
    """Yield the attributes that a method sets."""
    for code in _functions(function):
        for instruction in dis.get_instructions(code):
            if instruction.opname == "STORE_ATTR":
                yield str(instruction.argval)
