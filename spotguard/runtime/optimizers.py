"""What an optimizer's step asks of the rest: gradients that are the global mean.

Before it nobody changes weights, so the boundary can be saved; a closure that the optimizer calls
first, for forward and backward, still belongs to that time. In the first step of an attempt it is
also checked that all gradients went through `step.backward`: those that did not are each rank's
own, and the ranks would train apart, with nothing to be seen.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch.compiler import is_compiling
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spotguard.errors import UsageError
from spotguard.runtime.gradients import parameters_of
from spotguard.runtime.sharding import is_dtensor
from spotguard.runtime.tracked import TrackedModule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from spotguard.runtime.bitwise import BitwiseSync
    from spotguard.runtime.gradients import GradientSync
    from spotguard.runtime.keeping import Keeper

_UNWATCHED = contextlib.nullcontext()
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class OptimizerWatch:
    """Stands before each step of the tracked optimizers."""

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        gradients: GradientSync | BitwiseSync,
        keeper: Keeper,
        world_size: int,
    ) -> None:
        self._gradients = gradients
        self._keeper = keeper
        self._several = world_size > 1
        self._check = (
            GradientCheck(_names(keeper), modules, optimizers, gradients) if self._several else None
        )
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_step)

    @property
    def expected_gradients(self) -> AbstractContextManager[None]:
        """Within it, gradients are those of `step.backward`."""
        return self._check.expected_gradients() if self._check is not None else _UNWATCHED

    def end_of_first_step(self) -> None:
        """Take it that a script which was right in one step is right in all."""
        if self._check is not None:
            self._check.close()
            self._check = None

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Arguments | None:
        step = self._keeper.current
        if self._several and step is not None and step.is_halfway:
            raise UsageError(
                "optimizer.step() came before the last micro-batch of the step",
                hint="gradients are the global mean after the loop over the micro-batches: "
                "call optimizer.step() there",
            )
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None or not _calls_closure_first(optimizer):
            self._begin_to_change()
        if closure is None:
            return None
        evaluate = self._evaluated(closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluate}
        return (args[0], evaluate, *args[2:]), kwargs

    def _begin_to_change(self) -> None:
        self._gradients.catch_up()
        self._keeper.begin_to_change()

    def _evaluated(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure after which weights may change, and whose loss is that of all ranks."""

        def evaluate() -> Any:
            step = self._keeper.current
            before = step.passes_done if step is not None else 0
            loss = closure()
            if step is not None and step.passes_done > before:
                loss = step.mean_loss()
            self._begin_to_change()
            return loss

        return evaluate


class GradientCheck:
    """Finds, in one step, gradients that are not synchronised when an optimizer steps on them."""

    def __init__(
        self,
        names: Mapping[int, str],
        modules: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        gradients: GradientSync | BitwiseSync,
    ) -> None:
        self._optimizers = optimizers
        self._gradients = gradients
        self._names = names
        """Of the parameters of tracked modules, by their ids."""
        self._expected = False
        self._outside: dict[int, torch.Tensor] = {}
        watched = {id(p): p for p in parameters_of(optimizers)}
        watched.update((id(p), p) for module in modules for p in module.parameters())
        self._handles: list[Any] = [register_optimizer_step_pre_hook(self._before_step)]
        for parameter in watched.values():
            self._watch(parameter, parameter)
        for module in modules:
            for part in module.modules():
                self._watch_gathered(part)

    def close(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()

    @contextlib.contextmanager
    def expected_gradients(self) -> Iterator[None]:
        """Within it, gradients are made as they should be."""
        # Gradients that were thrown away before this backward pass do no harm.
        self._outside = {key: p for key, p in self._outside.items() if _has_gradient(p)}
        self._expected = True
        try:
            yield
        finally:
            self._expected = False

    def _watch(self, seen: torch.Tensor, parameter: torch.Tensor) -> None:
        """Note when `seen`, which is `parameter` or gathered from its parts, gets a gradient."""

        def note(_: torch.Tensor) -> None:
            if not self._expected:
                self._outside[id(parameter)] = parameter

        if seen.requires_grad and seen.is_leaf:
            watch: Any = seen.register_post_accumulate_grad_hook
            self._handles.append(watch(note))

    def _watch_gathered(self, part: torch.nn.Module) -> None:
        """FSDP2 puts whole parameters in the place of the parts when it goes forward."""
        parts = dict(part.named_parameters(recurse=False))
        if not any(map(is_dtensor, parts.values())):
            return
        seen: set[int] = set()

        def before_forward(*_: Any) -> None:
            if is_compiling():  # what is compiled is not looked into
                return
            for name, whole in part.named_parameters(recurse=False):
                if id(whole) not in seen and not is_dtensor(whole):
                    seen.add(id(whole))
                    self._watch(whole, parts[name])

        self._handles.append(part.register_forward_pre_hook(before_forward))

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        mine = parameters_of([optimizer])
        self._refuse(
            (p for p in mine if id(p) in self._outside and _has_gradient(p)),
            "got a gradient outside of step.backward(), which is not synchronised",
            'give each backward pass a phase: with step.phase("name"): for batch in step: ... '
            "step.backward(loss)",
        )
        if any(optimizer is known for known in self._optimizers):
            return
        known = self._gradients.synchronised()
        self._refuse(
            (p for p in mine if id(p) in self._names.keys() - known and _has_gradient(p)),
            "is trained by an optimizer that is not tracked, so nobody synchronises its gradient",
            "call run.track(optimizer=optimizer) before the loop",
        )

    def _refuse(self, parameters: Iterable[torch.Tensor], what: str, hint: str) -> None:
        for parameter in parameters:
            name = self._names.get(id(parameter), "a parameter")
            raise UsageError(f"{name} {what}: the ranks would train apart", hint=hint)


def _names(keeper: Keeper) -> dict[int, str]:
    return {
        id(parameter): f"{name}.{of_module}"
        for name, item in keeper.objects.items()
        if isinstance(item, TrackedModule)
        for of_module, parameter in item.bare.named_parameters()
    }


def _has_gradient(parameter: torch.Tensor) -> bool:
    gradient = parameter.grad
    if gradient is None:
        return False
    return bool((gradient.to_local() if is_dtensor(gradient) else gradient).any())


def _calls_closure_first(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether weights are untouched when the closure is called, as with all of torch's."""
    return type(optimizer).__module__.startswith("torch.optim.")
