"""A critic that is trained twice for each step of the generator, its weights clipped."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=100)
x = torch.randn(42, 3) + 1
maker = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
make = torch.optim.RMSprop(maker.parameters(), lr=0.005, eps=1e-2)
judge = torch.optim.RMSprop(critic.parameters(), lr=0.005, eps=1e-2)
run.track(maker=maker, critic=critic, make=make, judge=judge)
for step in run.steps(run.loader(x, global_batch_size=14, micro_batch_size=4), total=9):
    for turn in range(2):
        with step.phase(f"critic {turn}", judge):
            for real in step:
                fake = maker(torch.randn(len(real), 2)).detach()
                step.backward(critic(fake).mean() - critic(real).mean())
        judge.step()
        judge.zero_grad()
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.3, 0.3)
    with step.phase("maker", make):
        for real in step:
            step.backward(-critic(maker(torch.randn(len(real), 2))).mean())
    make.step()
    make.zero_grad()
