"""Trains a net with dropout in the precision that MODE names; says a hash of all state each step.

MODE is bf16, fp16 (autocast, the latter with a scaler), master (bf16 weights, and fp32 ones which
the optimizer steps on), reentrant or not-reentrant (activation checkpointing), or all (bf16,
compiled and checkpointed). In step AT (from 0) the process sends itself SIGTERM.
"""

import hashlib
import os
import signal
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import spotguard.runtime as spotguard

MODE = os.environ["MODE"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)
        )
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if MODE in ("reentrant", "not-reentrant", "all"):
                x = checkpoint(block, x, use_reentrant=MODE == "reentrant")
            else:
                x = block(x)
        found: torch.Tensor = self.head(x)
        return found


torch.set_num_threads(1)
run = spotguard.init(seed=1, save_every="2 steps")
torch.manual_seed(1)
net = Net()
model: Any = net
if MODE == "all":
    model = torch.compile(net, backend="aot_eager")
learns = list(net.parameters())
if MODE == "master":
    master = nn.ParameterList(nn.Parameter(p.detach().clone()) for p in learns)
    net.to(torch.bfloat16)
    learns = list(master)
    run.track(master=master)
optimizer = torch.optim.AdamW(learns, lr=0.01)
# So large a scale that the first steps overflow, and are left out.
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3, enabled=MODE == "fp16")
run.track(model=model, optimizer=optimizer, scaler=scaler)
dtype = {"bf16": torch.bfloat16, "all": torch.bfloat16, "fp16": torch.float16}.get(MODE)
data = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))
for step in run.steps(run.loader(list(data), global_batch_size=8, micro_batch_size=4), total=20):
    for x in step:
        x.requires_grad_(MODE == "reentrant")  # which runs no backward without it
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            out = model(x.to(net.head.weight.dtype))
        step.backward(out.float().square().mean(), scaler=scaler if MODE == "fp16" else None)
    if MODE == "master":
        for mine, theirs in zip(master, net.parameters(), strict=True):
            mine.grad = theirs.grad.float() if theirs.grad is not None else None
            theirs.grad = None
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if MODE == "master":
        with torch.no_grad():
            for mine, theirs in zip(master, net.parameters(), strict=True):
                theirs.copy_(mine)
    state = hashlib.sha256(repr(scaler.state_dict()).encode())
    for tensor in (
        *net.parameters(),
        *learns,
        *(t for s in optimizer.state.values() for t in s.values()),
    ):
        state.update(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    sys.stdout.write(f"state {step.number} {state.hexdigest()} {scaler.get_scale()}\n")
    sys.stdout.flush()
    if str(step.number) == os.environ.get("AT"):
        os.kill(os.getpid(), signal.SIGTERM)
