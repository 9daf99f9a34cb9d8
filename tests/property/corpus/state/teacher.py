"""A teacher that follows its student, as in BYOL and mean-teacher; its target is centred."""

import copy

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=68)
x = torch.randn(42, 6)
student = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
teacher = copy.deepcopy(student).requires_grad_(False)
center = {"value": torch.zeros(4), "momentum": 0.9}
optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
run.track(student=student, teacher=teacher, optimizer=optimizer, center=center)
for step in run.steps(run.loader(x, global_batch_size=14, micro_batch_size=4), total=12):
    for inputs in step:
        target = teacher(inputs) - center["value"]
        step.backward((student(inputs) - target - 0.1).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for mine, other in zip(teacher.parameters(), student.parameters(), strict=True):
            mine.lerp_(other, 0.05)
        center["value"].mul_(0.9).add_(teacher(x[:5]).mean(0), alpha=0.1)
