"""Parameters that a framework's optimizer trains beside the model that the framework knows.

A head that a loss owns, a list of layers that is no `ModuleList`: they are in no `state_dict()` of
the model, and a resume would begin them anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


class TrainedBeside(torch.nn.Module):
    """The parameters that others own, as one module to track."""

    def __init__(self, parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        super().__init__()
        self._parameters.update(parameters)  # `register_parameter` refuses plain tensors


def trained_beside(
    optimizers: Iterable[torch.optim.Optimizer], modules: Iterable[torch.nn.Module]
) -> dict[str, torch.nn.Module]:
    """Return what to track of the optimizers' parameters that are in none of `modules`, by name.

    The parameters' names tell their places in the optimizers, which a script makes alike each time.
    """
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    beside = [
        (f"optimizer{number}_group{group}_{place}", parameter)
        for number, optimizer in enumerate(optimizers)
        for group, settings in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(settings["params"])
        if id(parameter) not in known
    ]
    return {"trained_beside": TrainedBeside(beside)} if beside else {}
