"""Trains with an optimizer that keeps its state in a tensor subclass, as torchao's AdamW8bit does.

FROM is the first step that makes such state; TOLD the step in which it is told to stop.
"""

import os
import signal
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

import spotguard.runtime as spotguard


class EightBit(torch.Tensor):
    """Codes and a scale that behave like the tensor that they stand for."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes = codes
        self.scale = scale

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], []

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        plain = tree_map(lambda v: v.codes * v.scale if isinstance(v, cls) else v, args)
        return func(*plain, **(kwargs or {}))


class Adam8(torch.optim.Optimizer):
    """Steps down the gradient, and keeps moments of eight bits that it never reads."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        self.begun = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])
                if self.begun >= int(os.environ.get("FROM", "0")):
                    codes = torch.zeros_like(parameter, dtype=torch.int8)
                    self.state[parameter]["moment"] = EightBit(codes, torch.ones(()))
        self.begun += 1


run = spotguard.init(save_every="100 steps")
model = nn.Linear(4, 1)
optimizer = Adam8(model.parameters())
run.track(model=model, optimizer=optimizer)
loader = run.loader(
    torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), global_batch_size=8
)
for step in run.steps(loader, total=20):
    for x, y in step:
        step.backward(nn.functional.mse_loss(model(x), y))
        if str(step.number) == os.environ.get("TOLD"):
            os.kill(os.getpid(), signal.SIGTERM)
    optimizer.step()
    optimizer.zero_grad()
