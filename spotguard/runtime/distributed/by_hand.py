"""The parameters that only the script itself may train: no tracked optimizer has them.

A script may change weights without a `torch.optim` optimizer, all of them or those beside an
optimizer's. It may also put new parameters in the place of old ones in each step, add layers, or
freeze and thaw some. So they are looked for anew, in the tracked modules as they are.

Most of what no optimizer has is not trained at all: a teacher, a moving average. Those of a module
are synchronised from the first time on that any of them has a gradient on any rank.
"""

from __future__ import annotations

import logging
import operator
from typing import TYPE_CHECKING

import torch
from torch.optim.swa_utils import AveragedModel

from spotguard.runtime.distributed.wrappers import parameters_of
from spotguard.runtime.state.sharding import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from spotguard.runtime.distributed.collectives import Collectives

log = logging.getLogger("spotguard")
_own_parameters = operator.attrgetter("_parameters")
"""Torch's own dict of a module: `Module.parameters` takes three times as long."""


class TrainedByHand:
    """What the tracked modules have beside the tracked optimizers, module by module."""

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        ranks: Collectives,
    ) -> None:
        self._modules = [m for m in modules if not isinstance(m, AveragedModel)]
        self._optimizers = optimizers
        self._ranks = ranks
        self._walked: list[list[torch.Tensor]] = []
        """All parameters when they were last looked for; held, so that no id is used again."""
        self._beside: list[torch.Tensor] = []
        """Those that the script trains, if anyone does."""
        self._outside: list[list[torch.Tensor]] = []
        """Of these those of each module that no DDP or FSDP synchronises."""
        self._may_change = True
        self._adopted: set[int] = set()
        """The numbers of the modules in which the script trains some."""
        self._told = False

    def look(self, managed: set[int]) -> None:
        """Find them anew; those with the ids `managed` are synchronised by DDP or FSDP."""
        self._walked = [_parameters_in(module) for module in self._modules]
        of_optimizers = set(map(id, parameters_of(self._optimizers)))
        beside = [[p for p in walked if id(p) not in of_optimizers] for walked in self._walked]
        outside = [
            [p for p in some if id(p) not in managed and not is_dtensor(p)] for some in beside
        ]
        self._may_change = not self._optimizers or any(outside)
        self._beside = [p for some in beside for p in some if p.requires_grad]
        self._outside = [[p for p in some if p.requires_grad] for some in outside]

    def state(self) -> list[tuple[int, bool]]:
        """Return what is another when there may be others; costs nothing where there are none."""
        if not self._may_change:
            return []
        walked = map(_parameters_in, self._modules)
        return [(id(p), p.requires_grad) for of_module in walked for p in of_module]

    @property
    def candidates(self) -> list[torch.Tensor]:
        """All that are to be synchronised if the script trains them."""
        return [p for of_module in self._outside for p in of_module]

    @property
    def adopted(self) -> list[torch.Tensor]:
        """Those of the modules in which the script does train some."""
        return [p for number in sorted(self._adopted) for p in self._outside[number]]

    @property
    def have_gradients(self) -> bool:
        """True if the script may be about to change weights."""
        return any(p.grad is not None for p in self._beside)

    def adopt(self) -> bool:
        """Take in the modules in which any rank has got gradients; return whether there are new.

        For several ranks; blocks until they have met, if there are any to ask for.
        """
        others = [n for n, some in enumerate(self._outside) if some and n not in self._adopted]
        if not others:
            return False
        have = [any(p.grad is not None for p in self._outside[number]) for number in others]
        new = {n for n, has in zip(others, self._on_any_rank(have), strict=True) if has}
        self._adopted |= new
        return bool(new)

    def tell(self, parameters: Sequence[torch.Tensor]) -> None:
        """Say once, on the first of several ranks, that these are synchronised."""
        if self._told or not parameters:
            return
        self._told = True
        if self._ranks.world_size > 1 and not self._ranks.rank:
            log.warning(
                "no tracked optimizer trains %d parameters that get gradients, such as %s: they are"
                " made the mean over all ranks. Take your own all_reduce of them out, and freeze"
                " with requires_grad_(False) what nobody trains",
                len(parameters),
                self._name(parameters[0]),
            )

    def _on_any_rank(self, flags: Sequence[bool]) -> Sequence[bool]:
        # A process group of the script's own may know GPUs only.
        devices = [p.device for of_module in self._walked for p in of_module]
        device = next((d for d in devices if d.type != "cpu"), devices[0])
        counts = torch.tensor(flags, dtype=torch.float32, device=device)
        self._ranks.add_up(counts)()
        return [count > 0 for count in counts.tolist()]

    def _name(self, parameter: torch.Tensor) -> str:
        named = (pair for module in self._modules for pair in module.named_parameters())
        return next((name for name, other in named if other is parameter), "one")


def _parameters_in(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the module's parameters, each once."""
    found: dict[int, torch.Tensor] = {}
    modules, seen = [module], {id(module)}
    for part in modules:  # which grows meanwhile
        for parameter in _own_parameters(part).values():
            if parameter is not None:
                found[id(parameter)] = parameter
        for child in part._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    return list(found.values())
