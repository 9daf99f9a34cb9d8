"""Epochs of a job without data: episodes of reinforcement learning, of unequal lengths."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=31)
policy = nn.Linear(3, 4)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.02)
returns = {"mean": 0.0, "epochs": 0}
run.track(policy=policy, optimizer=optimizer, returns=returns)
for epoch in run.epochs(run.episodes(7), total=3, steps_per_epoch=4):
    for step in epoch:
        for numbers in step:
            losses = []
            for number in numbers:
                state = torch.full((3,), number % 3 - 1.0)
                for _ in range(1 + number % 3):
                    chances = policy(state).softmax(-1)
                    action = int(chances.multinomial(1))
                    losses.append(-chances[action].log() * (action - 1.5))
                    state = state + 0.1 * torch.randn(3)
            step.backward(torch.stack(losses).sum() / 14, reduction="part")
        optimizer.step()
        optimizer.zero_grad()
    returns["epochs"] += 1
