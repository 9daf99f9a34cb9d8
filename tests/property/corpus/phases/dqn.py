"""An online and a target network; epsilon falls, the target is copied every fourth step."""

import copy

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=101)
online = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
target = copy.deepcopy(online).requires_grad_(False)
optimizer = torch.optim.Adam(online.parameters(), lr=0.005, eps=1e-3)
state = {"epsilon": 1.0, "copies": 0}
run.track(online=online, target=target, optimizer=optimizer, state=state)
for step in run.steps(run.episodes(9), total=12):
    for numbers in step:
        errors = []
        for number in numbers:
            here = torch.full((4,), number % 4 - 1.5) + 0.1 * torch.randn(4)
            random_move = bool(torch.rand(()) < state["epsilon"])
            action = int(torch.randint(2, ())) if random_move else int(online(here).argmax())
            reward = float(action == number % 2)
            value = reward + 0.9 * target(here.roll(1)).max()
            errors.append((online(here)[action] - value).square())
        step.backward(torch.stack(errors).mean())
    optimizer.step()
    optimizer.zero_grad()
    state["epsilon"] *= 0.8
    if step.number % 4 == 3:
        target.load_state_dict(online.state_dict())
        state["copies"] += 1
