"""An optimizer of the script's own, by a momentum that is orthogonalised, as Muon's is."""

import torch
from torch import nn

import spotguard.runtime as spotguard


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                    state["steps"] = 0
                state["steps"] += 1
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = state["momentum"]
                update = update / (update.norm() + 1e-2)
                parameter.add_(update, alpha=-group["lr"] / (1 + 0.1 * state["steps"]))


run = spotguard.init(seed=53)
x = torch.randn(42, 6)
model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 6, bias=False))
optimizer = Muon(model.parameters())
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader(x, global_batch_size=14, micro_batch_size=3), total=12):
    for inputs in step:
        step.backward((model(inputs) - inputs).square().mean())
    optimizer.step()
    optimizer.zero_grad()
