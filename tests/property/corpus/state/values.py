"""Plain values: of the script, of an object, nested in lists and dicts."""

from types import SimpleNamespace

import torch
from torch import nn

import spotguard.runtime as spotguard

best, history, table = 1e9, [], {"a": [0, 0.0], "b": {"words": []}}
self = SimpleNamespace(patience=3, note=None, done=False)
run = spotguard.init(seed=65)
x = torch.randn(38, 4)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
run.track_values(globals(), "best", "history", "table")
run.track_values(self, "patience", "note", "done")
for step in run.steps(run.loader(x, global_batch_size=10, micro_batch_size=3), total=12):
    for inputs in step:
        step.backward((model(inputs) * (1 + 0.01 * len(history)) - inputs).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    best = min(best, 1 / (1 + step.number))
    history.append(step.number)
    table["a"][0] += 1
    table["b"]["words"].append(f"step {step.number}")
    self.patience, self.note, self.done = self.patience - 1, f"after {step.number}", step.number > 9
