"""nanoGPT's loop: places of one long text, drawn with replacement."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=81)
text = torch.randint(11, (300,))
model = nn.Sequential(nn.Embedding(11, 8), nn.Flatten(), nn.Linear(32, 11))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
best_val_loss = 1e9
run.track(model=model, optimizer=optimizer)
run.track_values(globals(), "best_val_loss")


def get_batch(samples):
    places = torch.randint(len(text) - 5, (samples,))
    return torch.stack([text[i : i + 4] for i in places]), text[places + 4]


@torch.no_grad()
def estimate_loss():
    losses = [
        float(nn.functional.cross_entropy(model(text[:40].view(10, 4)), text[4:44:4]))
        for _ in run.evaluate(range(3))
    ]
    return sum(losses)


for step in run.steps(run.draws(get_batch, global_batch_size=11, micro_batch_size=4), total=12):
    if step.number % 5 == 0:
        losses = estimate_loss()
        best_val_loss = min(best_val_loss, float(step.number))
    for inputs, targets in step:
        step.backward(nn.functional.cross_entropy(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
