"""Parameters that a framework's optimizer trains beside the model that the framework knows.

A head that a loss owns, a list of layers that is no `ModuleList`: they are in no `state_dict()` of
the model, and a resume would begin them anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping


class Beside(torch.nn.Module):
    """Parameters and buffers that others own, as one module to track, by names of their own."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():  # a path has dots, which register_buffer refuses
            trained = isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad
            (self._parameters if trained else self._buffers)[name] = tensor  # type: ignore[assignment]


def parameters_beside(
    optimizers: Iterable[torch.optim.Optimizer],
    known: Collection[int],
    name: str = "optimizer{number}_group{group}_{place}",
) -> dict[str, torch.Tensor]:
    """Return the optimizers' parameters of which no id is among the `known`.

    Their names tell their places in the optimizers, which a script makes alike each time.
    """
    return {
        name.format(number=number, group=group, place=place): parameter
        for number, optimizer in enumerate(optimizers)
        for group, settings in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(settings["params"])
        if id(parameter) not in known
    }


def trained_beside(
    optimizers: Iterable[torch.optim.Optimizer], modules: Iterable[torch.nn.Module]
) -> dict[str, torch.nn.Module]:
    """Return what to track of the optimizers' parameters that are in none of `modules`, by name."""
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    beside = parameters_beside(optimizers, known)
    return {"trained_beside": Beside(beside)} if beside else {}
