"""The modules that synchronise gradients by themselves: DDP and FSDP2, wherever they are.

A script may track the bare module and call the DDP around it, compile either, put one into a larger
module, or track a dict of its parameters alone. So they are looked for among all living modules, by
the parameters that they share with what is tracked.
"""

from __future__ import annotations

import gc
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from spotguard.errors import UsageError
from spotguard.runtime.distributed.model_parallel import refuse_model_parallel
from spotguard.runtime.state.sharding import fsdp_classes, is_fsdp_module, uses_fsdp

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.distributed.fsdp import FSDPModule


class Wrappers(NamedTuple):
    """What synchronises tracked parameters, in the same order on every rank."""

    ddp: list[DistributedDataParallel]
    fsdp: list[FSDPModule]
    """Also those within others: `fully_shard` makes one of each module that it is applied to."""

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Return all of them."""
        return [*self.ddp, *self.fsdp]  # type: ignore[list-item]


def find_wrappers(
    modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> Wrappers:
    """Return the DDP and FSDP2 modules that hold a parameter of what is tracked.

    Raises:
        UsageError: a DDP has a static graph. It then synchronises after the first backward pass,
            whatever it was told, and fails if that was not the step's last one (torch 2.13). Or
            several ranks hold one model together.
    """
    modules, optimizers = list(modules), list(optimizers)
    place: dict[int, int] = {}
    for number, parameter in enumerate(_parameters_of(modules, optimizers)):
        place.setdefault(id(parameter), number)
    first: dict[int, tuple[int, torch.nn.Module]] = {}
    for module in _candidates(modules):
        shared = [place[id(p)] for p in module.parameters() if id(p) in place]
        if shared:
            first[id(module)] = (min(shared), module)
    # Stable, so those of one tree that begin with the same parameter stay in its order.
    found = [module for _, module in sorted(first.values(), key=lambda pair: pair[0])]
    ddp = [module for module in found if isinstance(module, DistributedDataParallel)]
    if any(module.static_graph for module in ddp):
        raise UsageError(
            "DistributedDataParallel(static_graph=True) cannot accumulate micro-batches",
            hint="leave static_graph out",
        )
    fsdp: list[FSDPModule] = [module for module in found if is_fsdp_module(module)]
    # Not what an optimizer alone has: another check says that nothing saves those.
    tracked = [parameter for module in modules for parameter in module.parameters()]
    refuse_model_parallel(tracked, ddp, fsdp)
    return Wrappers(ddp, fsdp)


class LateWrappers:
    """Refuses what wraps a tracked model after the `known` wrappers were found.

    Nobody has told it to wait for a step's last micro-batch: ranks with unlike numbers of them
    would meet in the wrong place. To look through all that lives takes as long as there is much of
    it, so that is done only if a DDP was made since, or parameters are others, as with FSDP2.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        known: Sequence[torch.nn.Module],
    ) -> None:
        self._modules = modules
        self._optimizers = optimizers
        self._known = set(map(id, known))
        self._of_known = known
        self._before = _parameters_of(modules, optimizers)
        """Held, so that no id is used again."""
        self._made: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        made = self._made

        def note(module: torch.nn.Module, *_: Any) -> None:
            if isinstance(module, DistributedDataParallel):
                made.add(module)

        self._hook = register_module_module_registration_hook(note)

    def close(self) -> None:
        """Look at nothing any more."""
        self._hook.remove()
        self._before = []

    def refuse(self) -> None:
        """Look once, after the first forward pass.

        Raises:
            UsageError: there is such a wrapper.
        """
        suspicious = dist.is_initialized() and (len(self._made) > 0 or self._are_others())
        self.close()
        if not suspicious:
            return
        found = find_wrappers(self._modules, self._optimizers).modules
        if any(id(module) not in self._known for module in found):
            raise UsageError(
                "a tracked model was put into DDP or FSDP2 after the training loop had begun",
                hint="wrap it before run.steps(), outside of the loop",
            )

    def _are_others(self) -> bool:
        """Return whether FSDP2 was applied to a part, or may have been to what is around it."""
        if not uses_fsdp():
            return False
        parts = (part for module in self._modules for part in module.modules())
        if any(_synchronises(part) and id(part) not in self._known for part in parts):
            return True
        before = {*map(id, self._before), *(id(p) for m in self._of_known for p in m.parameters())}
        return any(id(p) not in before for p in _parameters_of(self._modules, self._optimizers))


def _candidates(modules: list[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    for module in modules:
        yield from filter(_synchronises, module.modules())
    if not dist.is_initialized():
        return  # neither can be made without a process group
    if _living():
        gc.collect()  # what one rank has thrown away already must not be found on another
        yield from _living()


def _living() -> list[torch.nn.Module]:
    """Ask for what refers to their classes: all instances do, and little else.

    A list of all objects would hold the tuple that another thread is filling just then, which
    CPython refuses to go on with: `SystemError: bad argument to internal function`.
    """
    return [thing for thing in gc.get_referrers(*_kinds()) if _synchronises(thing)]


def _kinds() -> list[type]:
    kinds: list[type] = [DistributedDataParallel, *fsdp_classes()]
    for kind in kinds:  # which grows meanwhile
        kinds += kind.__subclasses__()
    return kinds


def _parameters_of(
    modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> list[torch.Tensor]:
    return [*(p for module in modules for p in module.parameters()), *parameters_of(optimizers)]


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return all parameters of all groups of the optimizers."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [parameter for group in groups for parameter in group["params"]]


def _synchronises(thing: Any) -> bool:
    # By `type`: to ask a lazy proxy for its class may import or compute what it stands for.
    kind = type(thing)
    return issubclass(kind, DistributedDataParallel) or (
        issubclass(kind, torch.nn.Module) and is_fsdp_module(thing)
    )


def parameters_synchronised_by(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters whose gradients a DDP or FSDP2 module synchronises.

    DDP leaves out those that it was told to ignore.
    """
    ignored: Iterable[str] = ()
    if isinstance(module, DistributedDataParallel):
        ignored = module.parameters_to_ignore
        module = module.module
    return [parameter for name, parameter in module.named_parameters() if name not in ignored]


def frozen_in(ddp: DistributedDataParallel) -> list[torch.nn.Parameter]:
    """Return the parameters that `ddp` would synchronise if they were not frozen.

    DDP takes note once, when it is made, of which parameters are trained (torch 2.13). One that is
    thawed later gets a gradient that is each rank's own, and the ranks would train apart.
    """
    return [p for p in parameters_synchronised_by(ddp) if not p.requires_grad]


def refuse_thawed(ddp: DistributedDataParallel) -> None:
    """Refuse parameters that were thawed between the making of `ddp` and the training loop.

    It does not know of them, and which they are cannot be told any more.

    Raises:
        UsageError: there are such parameters.
    """
    if getattr(ddp, "reducer", None) is None:
        return
    noted = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # when it was made
    trained, _ = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    if len(trained) > int(noted["num_parameter_tensors"]):
        raise UsageError(
            "parameters were thawed after their DistributedDataParallel was made, which does not "
            "synchronise them: the ranks would train apart",
            hint="thaw them before the model is wrapped, or within the training loop",
        )


def settle_buckets(ddp: DistributedDataParallel) -> None:
    """Have `ddp` lay out its buckets for good, before its first backward pass.

    By itself it begins with one layout and rebuilds it once, by the order in which the first
    gradients came (torch 2.13). What stands where in a bucket decides in which order three or more
    ranks add up, so the first step after a resume would differ in its last bits from the same step
    of a run that nobody disturbed. Here a round of zeros arrives instead, from the last parameter
    to the first. All ranks must call it.
    """
    reducer: Any = getattr(ddp, "reducer", None)
    if reducer is None or not _will_rebuild(ddp) or reducer._rebuild_buckets():
        return
    parameters, sparse = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad for parameter in parameters]
    for parameter, is_sparse in zip(parameters, sparse, strict=True):
        layout = torch.sparse_coo  # such a bucket asks for a gradient; others take none for zeros
        parameter.grad = torch.zeros_like(parameter, layout=layout) if is_sparse else None
    reducer.prepare_for_backward([])
    with torch.enable_grad():
        start = torch.zeros((), requires_grad=True)
        _Arrivals.apply(start, reducer, len(parameters)).backward()  # type: ignore[no-untyped-call]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    reducer._rebuild_buckets()


def _will_rebuild(ddp: DistributedDataParallel) -> bool:
    """Return True if the first backward pass decides over the layout of the later ones."""
    return not (
        ddp.find_unused_parameters
        or ddp._has_rebuilt_buckets
        or ddp._use_python_reducer  # it has no buckets
        or ddp.mixed_precision is not None  # its own hook needs a forward pass before it
    )


class _Arrivals(torch.autograd.Function):
    """In its backward pass, tells a reducer that gradients have arrived, the last one first.

    A reducer can be told only within a backward pass. No parameter is in this one, so no hook of
    the script's runs.
    """

    @staticmethod
    def forward(ctx: Any, start: torch.Tensor, reducer: Any, count: int) -> torch.Tensor:
        ctx.reducer, ctx.count = reducer, count
        return start.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        for index in reversed(range(ctx.count)):
            ctx.reducer._autograd_hook(index)
        return gradients[0], None, None
