"""Trains a net with dropout that is compiled as WRAP says; says the weights after each step.

WRAP is plain, compiled, in place, parts (two layers compiled), ddp, compiled ddp, ddp compiled,
fsdp or fsdp compiled. In step AT (from 0) the process sends itself SIGTERM.
"""

import hashlib
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import spotguard.runtime as spotguard

WRAP = os.environ["WRAP"]


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="aot_eager")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def sharded(net: nn.Sequential) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def wrapped(net: nn.Sequential) -> Any:
    for what in reversed(WRAP.split()):
        net = {"ddp": nn.parallel.DistributedDataParallel, "compiled": compiled, "fsdp": sharded}[
            what
        ](net)
    return net


def main() -> None:
    torch.set_num_threads(1)
    run = spotguard.init(seed=1, save_every="100 steps", backend="gloo")
    torch.manual_seed(1)
    layers = [part for _ in range(3) for part in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))]
    net = nn.Sequential(*layers, nn.Linear(16, 1))
    parameters = list(net.parameters())
    model: Any = net
    if WRAP == "in place":
        net.compile(backend="aot_eager")
    elif WRAP == "parts":
        net[0], net[3] = compiled(net[0]), compiled(net[3])
    elif WRAP != "plain":
        model = wrapped(net) if WRAP != "fsdp compiled" else compiled(sharded(net))
        parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    run.track(model=model, optimizer=optimizer)
    data = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))
    loader = run.loader(list(data), global_batch_size=16, micro_batch_size=4)
    for step in run.steps(loader, total=6):
        for x in step:
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found = [whole(p.detach()).numpy() for p in parameters]
        digest = hashlib.sha256(b"".join(p.tobytes() for p in found)).hexdigest()
        length = float(sum((p.astype("float64") ** 2).sum() for p in found)) ** 0.5
        sys.stdout.write(f"state {step.number} {digest}\nlength {step.number} {length!r}\n")
        sys.stdout.flush()
        if str(step.number) == os.environ.get("AT"):
            os.kill(os.getpid(), signal.SIGTERM)
            while run._job.watch.agreed is None:  # else a fast machine trains all steps first
                time.sleep(0.001)
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main()
