"""What an optimizer's step asks of the rest: gradients that are the global mean.

Before it nobody changes weights, so the boundary can be saved; a closure that the optimizer calls
first, for forward and backward, still belongs to that time. In the first step of an attempt that
trains a parameter, which for a generator may be the fifth, it is also checked that its gradient
went through `step.backward`: one that did not is each rank's own, and the ranks would train apart,
with nothing to be seen.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch.compiler import is_compiling
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from spotguard.errors import UsageError
from spotguard.runtime.distributed.carried_gradients import CarriedGradients, has_gradient
from spotguard.runtime.distributed.gradients import count_parameters
from spotguard.runtime.distributed.wrappers import parameters_of
from spotguard.runtime.state.module_wrappers import plain_keys
from spotguard.runtime.state.sharding import is_dtensor
from spotguard.runtime.state.tracked import TrackedModule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from spotguard.runtime.checkpoint.training_state import Keeper
    from spotguard.runtime.distributed.bitwise_reduce import BitwiseSync
    from spotguard.runtime.distributed.gradients import GradientSync

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Where torch has the hooks of an optimizer's steps."""
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
        *,
        tell: Callable[[str], None],
        untracked: Callable[[Optimizer], None] = lambda optimizer: None,
    ) -> None:
        """`tell` is for what the script does that an interruption would make a loss.

        `untracked` is called before each step of any optimizer of the process.
        """
        self._gradients = gradients
        self._keeper = keeper
        self._carried = CarriedGradients(optimizers, keeper, tell)
        self._by_hand = not optimizers
        self._check = (
            GradientCheck(_names(keeper), modules, optimizers, gradients)
            if world_size > 1
            else None
        )
        self._untracked = untracked
        # One for the process: the optimizers that nobody has tracked are to be seen as well.
        self._of_all = register_optimizer_step_pre_hook(self._before_any_step)
        self._hooks = [o.register_step_pre_hook(self._before_step) for o in optimizers]

    def close(self) -> None:
        """Stand before no step any more."""
        _remove([self._of_all, *self._hooks])
        if self._check is not None:
            self._check.close()

    @property
    def expected_gradients(self) -> AbstractContextManager[None]:
        """Within it, gradients are those of `step.backward`."""
        if self._carried.may_be:
            self._carried.look()
        if self._check is None or not self._check.is_looking:
            return _UNWATCHED
        return self._check.expected_gradients()

    def gradients_are_there(self) -> None:
        """Take it that the script changes weights from here on, if no optimizer may do it all."""
        if self._by_hand:
            self._keeper.begin_to_change()
        elif self._gradients.may_be_trained_by_hand:
            self._keeper.begin_to_change(done=False)

    def end_of_step(self) -> None:
        """Take it that a script which trained a parameter rightly once always does."""
        self._carried.end_of_step()
        if self._check is not None:
            self._check.end_of_step()

    def _before_any_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._check is not None:
            self._check.before_step(optimizer)
        self._untracked(optimizer)

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Arguments | None:
        step = self._keeper.current
        # On one rank, too: there the gradients are a part of the mean that several ranks have.
        if step is not None and step.is_halfway and not self._keeper.has_left:
            raise UsageError(
                "optimizer.step() came before the last micro-batch of the step",
                hint="gradients are the global mean after the loop over the micro-batches: "
                "call optimizer.step() there",
            )
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._gradients.refuse_lost(optimizer)
            self._begin_to_change()
            return None
        if not _calls_closure_first(optimizer):
            self._begin_to_change()
        evaluate = self._evaluated(optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluate}
        return (args[0], evaluate, *args[2:]), kwargs

    def _begin_to_change(self) -> None:
        self._gradients.catch_up()
        self._keeper.begin_to_change()

    def _evaluated(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]
    ) -> Callable[[], Any]:
        """Return a closure after which weights may change, and whose loss is that of all ranks."""

        def evaluate() -> Any:
            step = self._keeper.current
            before = step.passes_done if step is not None else 0
            loss = closure()
            if step is not None and step.passes_done > before:
                loss = step.mean_loss()
            self._gradients.refuse_lost(optimizer)
            self._begin_to_change()
            return loss

        return evaluate


class GradientCheck:
    """Finds gradients that are not synchronised when an optimizer first steps on them."""

    def __init__(
        self,
        names: Mapping[int, str],
        modules: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        gradients: GradientSync | BitwiseSync,
    ) -> None:
        self._optimizers = optimizers
        self._gradients = gradients
        self._seen: dict[int, torch.Tensor] = {}
        """All parameters that are or were looked at: none is taken for another that is gone."""
        self._names = names
        """Of the parameters of tracked modules, by their ids."""
        self._expected = False
        self._outside: dict[int, torch.Tensor] = {}
        self._stepped: set[int] = set()
        """Ids of parameters that were trained in this step, and never before."""
        self._handles: dict[int, list[Any]] = {}
        """Of the hooks on each parameter that was not trained yet, by its id."""
        self._of_parts: list[tuple[set[int], Any]] = []
        """Ids of the parameters of each part of a sharded module, and of the hook on it."""
        self._settled: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )
        """How many parameters an optimizer has of which none is new."""
        for parameter in (p for module in modules for p in module.parameters()):
            self._watch_once(parameter)
        self._watch_added()
        for module in modules:
            for part in module.modules():
                self._watch_gathered(part)

    @property
    def is_looking(self) -> bool:
        """True while there are parameters that may be trained, and never were."""
        return bool(self._handles)

    def end_of_step(self) -> None:
        """Look no more at what the step has trained, and from now on at what was added."""
        if self._stepped:
            for key in self._stepped:
                _remove(self._handles.pop(key, []))
            self._stepped.clear()
            looked_at, self._of_parts = self._of_parts, []
            for parameters, handle in looked_at:
                if parameters & self._handles.keys():
                    self._of_parts.append((parameters, handle))
                else:
                    handle.remove()
        if count_parameters(self._optimizers) != self._known:
            self._watch_added()

    def close(self) -> None:
        """Look no more at anything."""
        _remove(handle for _, handle in self._of_parts)
        for handles in self._handles.values():
            _remove(handles)
        self._handles.clear()

    def _watch_added(self) -> None:
        """Look at the parameters that the optimizers have by now."""
        self._known = count_parameters(self._optimizers)
        self._settled.clear()
        for parameter in parameters_of(self._optimizers):
            self._watch_once(parameter)

    def _watch_once(self, parameter: torch.Tensor) -> None:
        if id(parameter) not in self._seen:
            self._seen[id(parameter)] = parameter
            self._watch(parameter, parameter)

    @contextlib.contextmanager
    def expected_gradients(self) -> Iterator[None]:
        """Within it, gradients are made as they should be."""
        # Gradients that were thrown away before this backward pass do no harm.
        self._outside = {key: p for key, p in self._outside.items() if has_gradient(p)}
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
            self._handles.setdefault(id(parameter), []).append(watch(note))

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
                    if id(parts[name]) not in self._handles:
                        continue
                    self._watch(whole, parts[name])

        handle = part.register_forward_pre_hook(before_forward)
        self._of_parts.append((set(map(id, parts.values())), handle))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the gradients of what it is about to train, unless they were looked at once."""
        count = count_parameters((optimizer,))
        if not self._handles or self._settled.get(optimizer) == count:
            return
        mine = [p for p in parameters_of((optimizer,)) if id(p) in self._handles]
        if not mine:
            self._settled[optimizer] = count
        self._stepped.update(id(p) for p in mine if p.grad is not None)
        self._refuse(
            (p for p in mine if id(p) in self._outside and has_gradient(p)),
            "got a gradient outside of step.backward(), which is not synchronised",
            'give each backward pass a phase: with step.phase("name"): for batch in step: ... '
            "step.backward(loss)",
        )
        if any(optimizer is known for known in self._optimizers):
            return
        known = self._gradients.synchronised()
        self._refuse(
            (p for p in mine if id(p) in self._names.keys() - known and has_gradient(p)),
            "is trained by an optimizer that is not tracked, so nobody synchronises its gradient",
            "call run.track(optimizer=optimizer) before the loop",
        )

    def _refuse(self, parameters: Iterable[torch.Tensor], what: str, hint: str) -> None:
        for parameter in parameters:
            name = self._names.get(id(parameter), "a parameter")
            raise UsageError(f"{name} {what}: the ranks would train apart", hint=hint)


def hook_steps(optimizers: Iterable[Optimizer]) -> contextlib.ExitStack:
    """Have the steps of all of them call hooks; closed, what is returned takes that back.

    Torch sees to it in `Optimizer.__init__`, which a Lookahead or a SAM may never call: its weights
    would count as unchanged while it changes them.

    Raises:
        UsageError: one has a `step` that cannot be replaced.
    """
    undo = contextlib.ExitStack()
    for optimizer in optimizers:
        for hooks in _HOOKS:
            optimizer.__dict__.setdefault(hooks, OrderedDict())
        if not _calls_hooks(optimizer):
            undo.callback(_hook_step(optimizer))
    return undo


def _calls_hooks(optimizer: Optimizer) -> bool:
    step = optimizer.step  # it may be another optimizer's
    return getattr(step, "hooked", False) and getattr(step, "__self__", optimizer) is optimizer


@contextlib.contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Within it the optimizer calls none of its hooks.

    A script's own step may go around the class's, which calls them as well: a rate would be scaled
    twice. Whether it gets there, or takes its place, nobody can tell before.
    """
    before = {name: optimizer.__dict__[name] for name in _HOOKS}
    optimizer.__dict__.update((name, OrderedDict()) for name in _HOOKS)
    try:
        yield
    finally:
        for name, hooks in before.items():
            hooks.update(optimizer.__dict__[name])  # those that the step itself has registered
        optimizer.__dict__.update(before)


def _hook_step(optimizer: Optimizer) -> Callable[[], None]:
    """Put a step that calls hooks in the place of this one's; return what takes it back."""
    of_instance, own = optimizer.__dict__.get("step"), optimizer.step

    @functools.wraps(own)  # a scheduler looks for its mark on it
    def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with _without_hooks(optimizer):
            return own(*args, **kwargs)

    hooked = MethodType(Optimizer.profile_hook_step(step), optimizer)
    optimizer.__dict__["step"] = hooked
    if optimizer.step is not hooked:
        del optimizer.__dict__["step"]
        raise UsageError(
            f"{type(optimizer).__name__}: nobody can tell when its step() begins to change weights",
            hint="track the optimizer that it steps by, in its place",
        )

    def take_back() -> None:
        if optimizer.__dict__.get("step") is not hooked:
            return  # a scheduler has put its own around it
        del optimizer.__dict__["step"]
        if of_instance is not None:
            optimizer.__dict__["step"] = of_instance

    return take_back


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


def _names(keeper: Keeper) -> dict[int, str]:
    return {
        id(parameter): f"{name}.{key_of(of_module)}"
        for name, item in keeper.objects.items()
        if isinstance(item, TrackedModule)
        for key_of in (plain_keys(item.bare),)
        for of_module, parameter in item.bare.named_parameters()
    }


def _calls_closure_first(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether weights are untouched when the closure is called, as with all of torch's."""
    return type(optimizer).__module__.startswith("torch.optim.")
