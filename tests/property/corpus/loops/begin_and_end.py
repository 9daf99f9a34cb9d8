"""An engine owns the loop: it asks for steps one by one, and evaluates between them."""

import torch
from torch import nn

import spotguard.runtime as spotguard


class Engine:
    def __init__(self, run, model, loader):
        self.run, self.model, self.loader = run, model, loader
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)
        self.history = []
        run.track(model=model, optimizer=self.optimizer)
        run.track_values(self, "history")

    def train(self, total):
        done = self.run.restore(self.loader, total=total)
        if self.run.evaluation_was_cut:
            self.evaluate(done)
        while (step := self.run.begin_step()) is not None:
            batches = iter(step)
            for _ in range(len(step)):
                x, y = next(batches)
                with step.weighted(nn.functional.mse_loss(self.model(x), y)) as loss:
                    loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.run.end_step()
            if (step.number + 1) % 4 == 0:
                self.evaluate(step.number + 1)
        self.run.finish()

    def evaluate(self, done):
        for _ in self.run.evaluate(range(3)):
            with torch.no_grad():
                self.model(torch.zeros(2, 6))
        self.history.append(done)


run = spotguard.init(seed=4)
x = torch.randn(40, 6)
data = torch.utils.data.TensorDataset(x, x[:, :1].tanh())
model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
Engine(run, model, run.loader(data, global_batch_size=10, micro_batch_size=3)).train(13)
