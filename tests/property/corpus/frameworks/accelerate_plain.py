"""A script in the shape of Accelerate's examples."""
# property: server=accelerate elastic=first

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spotguard.integrations.accelerate import SpotguardDataLoader

accelerator = Accelerator(gradient_accumulation_steps=1, cpu=True)
torch.manual_seed(3)
x = torch.randn(40, 8)
samples = TensorDataset(x, x @ torch.randn(8, 1))
model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))
train_dataloader = DataLoader(samples, shuffle=True, batch_size=4)
eval_dataloader = DataLoader(samples, batch_size=10)
train_dataloader = SpotguardDataLoader(accelerator, train_dataloader, global_batch_size=12)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)
for _ in train_dataloader.epochs(4):
    model.train()
    for inputs, targets in train_dataloader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
    model.eval()
    for inputs, targets in train_dataloader.evaluate(eval_dataloader):
        with torch.no_grad():
            accelerator.gather_for_metrics(nn.functional.mse_loss(model(inputs), targets))
