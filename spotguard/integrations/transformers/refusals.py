"""What a Trainer may ask for that does not go together with surviving, each in one sentence."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from spotguard.errors import UsageError
from spotguard.integrations.transformers.overrides import OWN_LOOP, own_loop

if TYPE_CHECKING:
    from collections.abc import Iterator


def refuse_unsupported(trainer: Any) -> None:
    """Return if `trainer` can survive.

    Raises:
        UsageError: it cannot; the message says why and what to do.
    """
    for problem, hint in _problems(trainer):
        raise UsageError(f"this Trainer cannot survive: {problem}", hint=hint)


def _problems(trainer: Any) -> Iterator[tuple[str, str]]:
    args = trainer.args
    loop = own_loop(trainer)
    if loop is not None:
        yield loop, OWN_LOOP
    if trainer.is_deepspeed_enabled:
        yield (
            "DeepSpeed keeps weights and optimizer where spotguard does not see them",
            "leave deepspeed out of the training arguments; DDP is used then",
        )
    if trainer.is_fsdp_enabled or args.fsdp:
        yield (
            "fsdp= is not supported by this integration",
            "leave it out, or write the loop with spotguard.runtime, which knows FSDP2",
        )
    if args.n_gpu > 1:
        yield (
            f"one process has {args.n_gpu} GPUs, and DataParallel would cut each batch again",
            "start one process for each GPU: spotguard up does, and torchrun",
        )
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    if parallel is not None or trainer.is_model_parallel:
        yield (
            "its model or its sequences are cut over ranks",
            "leave parallelism_config and device_map out",
        )
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size changes the batch in mid-run",
            "set per_device_train_batch_size",
        )
    if args.enable_jit_checkpoint:
        yield (
            "enable_jit_checkpoint saves at SIGTERM in its own way, at the same time",
            "leave it out: the run is saved when it is told to stop",
        )


def refuse_to_train(*, trains_again: bool, trial: Any) -> None:
    """Return if `trainer.train` may begin.

    Raises:
        UsageError: it is a trial of a search, or comes a second time.
    """
    if trial is not None:
        raise UsageError(
            "a search over hyperparameters cannot survive: each trial is a training of its own",
            hint="launch a run for each trial",
        )
    if trains_again:
        raise UsageError(
            "trainer.train() was called twice, but a run survives one training only",
            hint="launch another run for the second one",
        )


def ignored_checkpoint(given: Any, attempt: int) -> str:
    """Return what to tell of a `resume_from_checkpoint` that was given to `trainer.train`.

    A script that looks for the newest folder in its output finds one in every later attempt on
    the same machine; there the run's own checkpoint is the newer one, and knows its place.

    Raises:
        UsageError: this is the run's first attempt, so the script means to begin from it.
    """
    place = os.fspath(given) if isinstance(given, (str, os.PathLike)) else given
    if attempt == 1:
        raise UsageError(
            f"trainer.train(resume_from_checkpoint={place!r}) cannot begin a run of spotguard, "
            "which goes on from its own checkpoints only",
            hint="leave it out; to begin with other weights, load them into the model",
        )
    return f"resume_from_checkpoint={place!r} is ignored: the run goes on from its own checkpoint"
