"""The moments of a training at which a blow may come, told without the script's help."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from spotguard.runtime.loop.training import Training
from spotguard.runtime.run import Run
from spotguard.runtime.step import Step
from spotguard.storage import FileStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.property.child.blows import Blows
    from tests.property.child.witness import Witness

MOMENTS = (
    *("set-up", "restored", "epoch-top", "step", "batch", "backward", "gradients"),
    *("before-optimizer", "stepped", "boundary", "shard", "manifest", "committed"),
    *("evaluating", "epoch-end", "after-loop"),
)
"""In the order in which an attempt comes to them."""
ONCE = {"restored", "after-loop"}


def watch_moments(blows: Blows, witness: Witness, *, leave_at: int | None) -> None:
    """Have `blows` told of each moment; after `leave_at` steps the script leaves its loop."""

    def tracks(*arguments: Any) -> None:
        witness.saw(arguments)
        blows.at("set-up")

    _around(Run, "_track", before=tracks)
    _around(Training, "start", after=lambda: blows.at("restored"))
    _around(Training, "begin_epoch", after=lambda: blows.at("epoch-top"))
    _around(Training, "begin_epoch_end", after=lambda: blows.at("epoch-end"))
    _around(Training, "_finish", after=lambda: blows.at("after-loop"))
    _around(Training, "left", after=lambda: blows.at("after-loop"))
    _around(Training, "end", after=lambda: blows.at("boundary"))
    _watch_steps(blows, leave_at)
    _watch_batches(blows)
    _watch_backward(blows)
    _watch_evaluations(blows)
    _watch_saves(blows)
    register_optimizer_step_pre_hook(lambda *_: blows.at("before-optimizer"))
    register_optimizer_step_post_hook(lambda *_: blows.at("stepped"))


def _around(
    owner: Any,
    name: str,
    *,
    before: Callable[..., Any] | None = None,
    after: Callable[[], Any] | None = None,
) -> None:
    whole = getattr(owner, name)

    @functools.wraps(whole)
    def watched(*arguments: Any, **options: Any) -> Any:
        if before is not None:
            before(*arguments, **options)
        found = whole(*arguments, **options)
        if after is not None:
            after()
        return found

    setattr(owner, name, watched)


def _watch_steps(blows: Blows, leave_at: int | None) -> None:
    begin = Training.begin

    @functools.wraps(begin)
    def watched(self: Training, **options: Any) -> Step | None:
        step = begin(self, **options)
        if step is not None:
            blows.step = step.number
            blows.at("step")
        return step

    Training.begin = watched  # type: ignore[method-assign]
    if leave_at is not None:
        _leave_loops(leave_at)


def _leave_loops(leave_at: int) -> None:
    """Have `run.steps` left as by a `break` at the top of its body, with so many steps done."""
    steps = Run.steps

    @functools.wraps(steps)
    def left(self: Run, *arguments: Any, **options: Any) -> Iterator[Step]:
        loop = steps(self, *arguments, **options)
        for step in loop:
            if step.number >= leave_at:
                loop.close()  # type: ignore[attr-defined]  # what Python does at a `break`
                return
            yield step

    Run.steps = left  # type: ignore[method-assign]


def _watch_batches(blows: Blows) -> None:
    iterate = Step.__iter__

    @functools.wraps(iterate)
    def watched(self: Step) -> Iterator[Any]:
        for batch in iterate(self):
            blows.at("batch")
            yield batch

    Step.__iter__ = watched  # type: ignore[method-assign]


def _watch_backward(blows: Blows) -> None:
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def watched(tensors: Any, *arguments: Any, **options: Any) -> None:
        first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors), None)
        if first is not None and first.requires_grad:
            first.register_hook(lambda _: blows.at("backward"))
        backward(tensors, *arguments, **options)
        blows.at("gradients")

    torch.autograd.backward = watched


def _watch_evaluations(blows: Blows) -> None:
    evaluate = Training.evaluate

    @functools.wraps(evaluate)
    def watched(self: Training, batches: Any) -> Iterator[Any]:
        for batch in evaluate(self, batches):
            blows.at("evaluating")
            yield batch

    Training.evaluate = watched  # type: ignore[method-assign]


def _watch_saves(blows: Blows) -> None:
    put = FileStore.put

    @functools.wraps(put)
    def watched(self: FileStore, key: str, *arguments: Any, **options: Any) -> str:
        if key.endswith(".safetensors"):
            blows.at("shard")
        elif key.endswith("manifest.json"):
            blows.at("manifest")
        found = put(self, key, *arguments, **options)
        if key.endswith("manifest.json"):
            blows.at("committed")
        return found

    FileStore.put = watched  # type: ignore[method-assign]
