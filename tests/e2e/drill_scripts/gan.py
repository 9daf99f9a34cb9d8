"""A good script: two networks that learn from each other, each in a phase of its own."""

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=2)
torch.manual_seed(0)
x = torch.randn(512, 2) @ torch.tensor([[1.0, 0.5], [0.0, 0.3]]) + 1
generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
discriminator = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
run.track(
    generator=generator,
    discriminator=discriminator,
    g_optimizer=g_optimizer,
    d_optimizer=d_optimizer,
)
loader = run.loader(torch.utils.data.TensorDataset(x), global_batch_size=28, micro_batch_size=4)
for step in run.steps(loader, total=60):
    with step.phase("discriminator", d_optimizer):
        for (real,) in step:
            fake = generator(torch.randn(len(real), 4)).detach()
            verdicts = discriminator(real), discriminator(fake)
            step.backward(
                nn.functional.softplus(-verdicts[0]).mean()
                + nn.functional.softplus(verdicts[1]).mean()
            )
    d_optimizer.step()
    d_optimizer.zero_grad()
    with step.phase("generator", g_optimizer):
        for (real,) in step:
            verdict = discriminator(generator(torch.randn(len(real), 4)))
            step.backward(nn.functional.softplus(-verdict).mean())
    g_optimizer.step()
    g_optimizer.zero_grad()
