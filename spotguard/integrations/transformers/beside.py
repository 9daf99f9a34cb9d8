"""What a Trainer trains, or changes, beside its model: weights of a loss, a reference that follows.

The Trainer's checkpoints have its model alone. A head that a loss owns is trained by the same
optimizer, and a callback may move a second model after the first.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_callback import ExportableState

from spotguard.errors import UsageError
from spotguard.integrations.trained_beside import Beside, parameters_beside
from spotguard.integrations.transformers.overrides import holds_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

log = logging.getLogger("spotguard")

_CHECKED_STEPS = 3
_ELEMENTS = 8


class Attached:
    """All that hangs on a Trainer beside its model, and is no other tracked object's."""

    def __init__(self, trainer: Any, optimizer: torch.optim.Optimizer, tracked: Any) -> None:
        """`tracked` are modules of which all is saved already."""
        of_model = {id(p) for p in trainer.model.parameters()}
        self._known = {id(t) for m in (trainer.model, *tracked) for t in _tensors(m)}
        self._trained = {id(p) for g in optimizer.param_groups for p in g["params"]}
        self._optimizer = optimizer
        self._others: dict[str, list[torch.Tensor]] = {}
        self._watched: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._beside = list(parameters_beside([optimizer], of_model).values())
        self._has_told = False
        self._steps = 0
        self._of_trainer = dict(_modules_of(trainer))
        self._of_callbacks: dict[str, torch.nn.Module] = {}
        self._callbacks = trainer.callback_handler.callbacks
        for callback in self._callbacks:
            self._of_callbacks |= dict(_modules_of(callback))

    def to_track(self) -> dict[str, torch.nn.Module]:
        """Return what has to be saved with the model, by the names to track it under.

        That is what the Trainer's optimizer trains, with the buffers beside it, and any module that
        a callback holds: it is there to change it.
        """
        found: dict[str, torch.nn.Module] = {}
        for name, module in self._of_callbacks.items():
            self._take(found, name, self._new(module))
        for name, module in self._of_trainer.items():
            tensors = self._new(module)
            if any(id(tensor) in self._trained for tensor in tensors.values()):
                self._take(found, name, tensors)
            else:
                self._others[name] = _outermost(tensors)
        rest = parameters_beside([self._optimizer], self._known, "group{group}.{place}")
        self._take(found, "optimizer_parameters", rest)
        return {f"trainer_{name}": module for name, module in found.items()}

    def _new(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {name: t for name, t in _named_tensors(module) if id(t) not in self._known}

    def _take(
        self,
        found: dict[str, torch.nn.Module],
        name: str,
        tensors: dict[str, torch.Tensor],
    ) -> None:
        if tensors:
            self._known |= set(map(id, tensors.values()))
            found[name] = Beside(tensors)

    def drop_gradients(self) -> None:
        """Throw away what the Trainer's `model.zero_grad()` does not reach.

        Else each step would train the loss's weights on the gradients of all steps before it, which
        no checkpoint has.
        """
        kept = [parameter for parameter in self._beside if parameter.grad is not None]
        for parameter in kept:
            parameter.grad = None
        if kept and not self._has_told:
            self._has_told = True
            log.info(
                "gradients of %d parameters beside the model are cleared after each step: the "
                "Trainer clears those of its model only",
                len(kept),
            )

    def watch(self) -> None:
        """Look at what is not saved, as it is when the training begins."""
        for name, tensors in self._others.items():
            self._watched[name] = [(t, _some(t).clone()) for t in tensors]

    def _tell_of_callbacks(self) -> None:
        """Say which callbacks hold tensors, such as averages, and give no state to save."""
        for callback in self._callbacks:
            if isinstance(callback, ExportableState):
                continue
            kept = [name for name, value in vars(callback).items() if holds_tensors(value)]
            if kept:
                log.warning(
                    "%s holds tensors in %s, which no checkpoint has: after an interruption they "
                    "begin anew (make the callback an ExportableState, or track them)",
                    type(callback).__name__,
                    ", ".join(kept),
                )

    def check(self) -> None:
        """Make sure, after an attempt's first steps, that what is not saved does not change.

        Raises:
            UsageError: a module that hangs on the Trainer is changed by training.
        """
        if self._steps >= _CHECKED_STEPS:
            return
        self._steps += 1
        if self._steps == 1:
            self._tell_of_callbacks()
        for name, pairs in self._watched.items():
            if any(not torch.equal(_some(t), before) for t, before in pairs):
                raise UsageError(
                    f"trainer.{name} changes in training, but is neither the model nor trained by "
                    "the Trainer's optimizer: no checkpoint would have it",
                    hint=f"run = spotguard.init(); run.track({name}=trainer.{name}); "
                    "attach(trainer, run)",
                )


def _modules_of(holder: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules in an object's attributes, also in lists and dicts, each with a name."""
    for name, value in vars(holder).items():
        if name in ("model", "model_wrapped"):
            continue
        parts: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, dict):
            parts = value.items()
        elif isinstance(value, (list, tuple)):
            parts = enumerate(value)
        for key, part in ((None, value), *parts):
            if isinstance(part, torch.nn.Module):
                yield name if key is None else f"{name}_{key}", part


def _named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    persistent = module.state_dict(keep_vars=True).keys()
    yield from ((name, t) for name, t in module.named_buffers() if name in persistent)


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _outermost(tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the first and the last parameter: what moves a model moves these."""
    usable = [t for t in tensors.values() if t.numel() and not t.is_meta and t.is_floating_point()]
    return [usable[0], usable[-1]] if usable else []


def _some(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)[-_ELEMENTS:]
