"""Trains the GPT of the examples, smaller, and says each step's loss and a hash of the state.

EXACT goes to `init`; WRAP is none, ddp or fsdp; WORKERS read ahead; PACE_S is added to each step.
With AVERAGE a dict of averaged weights is tracked, sharded like the model, and its length is said.
"""

import hashlib
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import spotguard.runtime as spotguard

STEPS = 12
_EXAMPLE = Path(__file__).parents[3] / "examples" / "train_gpt.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("train_gpt", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module
    spec.loader.exec_module(module)
    return module


def whole(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach()


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    state = hashlib.sha256()
    moments = [list(kept.values()) for kept in optimizer.state_dict()["state"].values()]
    for tensor in [*model.parameters(), *(value for kept in moments for value in kept)]:
        state.update(whole(tensor).contiguous().numpy().tobytes())
    return state.hexdigest()


def main() -> None:
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    torch.set_num_threads(2 if os.environ["EXACT"] and alone else 1)  # bitwise puts it right
    train_gpt = example()
    run = spotguard.init(seed=1, exact=os.environ["EXACT"] or None, save_every="100 steps")
    torch.manual_seed(1)
    model: nn.Module = train_gpt.GPT(width=32, layers=2, length=32, dropout=0.1)
    if os.environ["WRAP"] == "ddp" and run.world_size > 1:
        model = nn.parallel.DistributedDataParallel(model)
    elif os.environ["WRAP"] in ("fsdp", "hsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        halves = os.environ["WRAP"] == "hsdp" and run.world_size % 2 == 0
        shape = (2, run.world_size // 2) if halves else (run.world_size,)
        mesh = init_device_mesh("cpu", shape)
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS)
    loader = run.loader(
        train_gpt.Text(32, files=4),
        global_batch_size=21,
        micro_batch_size=4,
        num_workers=int(os.environ.get("WORKERS", "0")),
    )
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    average: dict[str, torch.Tensor] = {}
    if os.environ.get("AVERAGE"):
        average = {name: p.detach().clone() for name, p in model.named_parameters()}
        run.track(average=average)
    for step in run.steps(loader, total=STEPS):
        for x, y in step:
            logits = model(x)
            step.backward(nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        for name, parameter in model.named_parameters():
            if name in average:
                average[name].lerp_(parameter.detach(), 0.1)
        loss = 0.0 if step.loss is None else step.loss.item()
        sys.stdout.write(f"loss {step.number} {loss!r}\n")
        sys.stdout.write(f"state {step.number} {fingerprint(model, optimizer)}\n")
        if average:
            squares = (whole(value).square().sum().item() for value in average.values())
            sys.stdout.write(f"average {step.number} {sum(squares) ** 0.5!r}\n")
        sys.stdout.flush()
        time.sleep(float(os.environ.get("PACE_S", "0")))
    sys.stdout.write(f"digest {fingerprint(model, optimizer)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
