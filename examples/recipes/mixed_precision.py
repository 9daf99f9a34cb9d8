# /// script
# dependencies = ["torch>=2.6", "numpy"]
# ///
"""bf16 autocast, torch.compile and activation checkpointing, each by a flag; prints what it costs.

python examples/recipes/mixed_precision.py --bf16 --compile inductor --checkpointing
spotguard up examples/recipes/mixed_precision.py --yes -- --bf16 --compile inductor
"""

import argparse
import contextlib
import time

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import spotguard.runtime as spotguard


class Net(nn.Module):
    def __init__(self, width: int, layers: int, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return x


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--bf16", action="store_true")
    options.add_argument("--checkpointing", action="store_true")
    options.add_argument("--compile", metavar="BACKEND", help="inductor, or aot_eager to try it")
    options.add_argument("--width", type=int, default=128)
    options.add_argument("--steps", type=int, default=20)
    given = options.parse_args()

    run = spotguard.init(seed=1)
    model = Net(given.width, 8, given.checkpointing).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if given.compile:
        model = torch.compile(
            model, backend=given.compile
        )  # saved under its own names: a resume need not compile
    run.track(model=model, optimizer=optimizer)
    data = torch.randn(512, given.width, generator=torch.Generator().manual_seed(0))
    loader = run.loader(list(data), global_batch_size=256, micro_batch_size=64)

    kept, seconds = 0, []
    for step in run.steps(loader, total=given.steps):
        began = time.perf_counter()
        for x in step:
            kept = 0

            def count(tensor: torch.Tensor) -> torch.Tensor:
                nonlocal kept
                kept += tensor.nbytes if not isinstance(tensor, nn.Parameter) else 0
                return tensor

            x = x.to(run.device)
            counted = saved_tensors_hooks(count, lambda tensor: tensor)
            cast = torch.autocast(run.device.type, torch.bfloat16, enabled=given.bf16)
            with contextlib.nullcontext() if given.compile else counted, cast:
                loss = (model(x).float() - x.roll(1, 0)).square().mean()
            step.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - began)
    if seconds:
        middle = sorted(seconds)[len(seconds) // 2]
        memory = "" if given.compile else f", {kept / 1e6:.1f} MB kept for backward"
        print(f"{1e3 * middle:.1f} ms a step{memory}")


if __name__ == "__main__":
    main()
