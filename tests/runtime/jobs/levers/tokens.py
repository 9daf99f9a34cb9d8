"""Trains with losses that are means over tokens; says each step's loss and the weights' length.

WRAP is plain, ddp or fsdp; REDUCTION mean or sum; ZERO=set has gradients set to zero instead of
taken away; EMPTY makes the samples that one rank of three has in the first steps have no token, and
their loss NaN. EXACT is `bitwise` or nothing.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import spotguard.runtime as spotguard

WRAP = os.environ.get("WRAP", "plain")
REDUCTION = os.environ.get("REDUCTION", "mean")
EMPTY = bool(os.environ.get("EMPTY"))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def wrapped(bare: nn.Sequential) -> nn.Module:
    if WRAP == "ddp":
        return nn.parallel.DistributedDataParallel(bare)
    if WRAP == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(bare, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return bare


torch.set_num_threads(1)
run = spotguard.init(seed=1, backend="gloo", exact=os.environ.get("EXACT") or None)
torch.manual_seed(1)
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
model = wrapped(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
run.track(model=model, optimizer=optimizer)
draw = torch.Generator().manual_seed(2)
tokens = torch.randint(1, 9, (32,), generator=draw)
if EMPTY:  # of 16 samples in four micro-batches, the third is all that the second rank has
    tokens[8:12] = 0
texts = torch.randn(32, 8, 6, generator=draw)
labels = torch.randint(0, 5, (32, 8), generator=draw)
for row, count in zip(labels, tokens.tolist(), strict=True):
    row[count:] = -100
data = torch.utils.data.TensorDataset(texts, labels)
loader = run.loader(data, global_batch_size=16, micro_batch_size=4, shuffle=False)
for step in run.steps(loader, total=4):
    for x, y in step:
        loss = nn.functional.cross_entropy(
            model(x).flatten(0, 1), y.flatten(), reduction=REDUCTION, ignore_index=-100
        )
        if EMPTY and WRAP != "plain" and not bool(loss.isfinite()):
            loss = model(x).sum() * 0
        step.backward(loss, reduction=REDUCTION, weight=(y != -100).sum())
    mean = float(step.mean_loss())
    optimizer.step()
    optimizer.zero_grad(set_to_none=os.environ.get("ZERO") != "set")
    parameters = [whole(p.detach()) for p in net.parameters()]
    length = sum(p.double().square().sum().item() for p in parameters) ** 0.5
    sys.stdout.write(f"step {step.number} {mean!r} {length!r}\n")
    sys.stdout.flush()
