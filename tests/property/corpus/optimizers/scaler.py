"""Half precision on the CPU, with a scaler that grows."""
# property: elastic=samples

import torch
from torch import nn

import spotguard.runtime as spotguard

run = spotguard.init(seed=54)
x = torch.randn(42, 6)
data = torch.utils.data.TensorDataset(x, x[:, :2].tanh())
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
run.track(model=model, optimizer=optimizer, scaler=scaler)
for step in run.steps(run.loader(data, global_batch_size=14, micro_batch_size=3), total=12):
    for inputs, targets in step:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(inputs)
        step.backward(nn.functional.mse_loss(outputs.float(), targets), scaler=scaler)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
