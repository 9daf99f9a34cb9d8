"""An object of the script's own with a state: a curriculum that follows the loss."""

import torch
from torch import nn

import spotguard.runtime as spotguard


class Curriculum:
    def __init__(self):
        self.level, self.history, self.weights = 1.0, [], torch.ones(3)

    def update(self, number):
        self.level *= 1.0 + 0.1 / (1 + number)
        self.history.append(round(self.level, 6))
        self.weights[number % 3] += 0.25

    def state_dict(self):
        return {"level": self.level, "history": self.history, "weights": self.weights}

    def load_state_dict(self, state):
        self.level, self.history = state["level"], list(state["history"])
        self.weights = state["weights"].clone()


run = spotguard.init(seed=64)
x = torch.randn(40, 6)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
curriculum = Curriculum()
run.track(model=model, optimizer=optimizer, curriculum=curriculum)
for step in run.steps(run.loader(x, global_batch_size=13, micro_batch_size=3), total=12):
    for inputs in step:
        step.backward(curriculum.level * (model(inputs) - inputs).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    curriculum.update(step.number)
