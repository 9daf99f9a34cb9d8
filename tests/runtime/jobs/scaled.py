"""A small training whose global batch follows the ranks; prints the rate of each optimizer step.

HURT is `STEP:RANK`: that rank gets SIGTERM in the midst of that step.
"""

import os
import signal
import sys
from typing import Any

import torch
from torch import nn

import spotguard.runtime as spotguard

REFERENCE = int(os.environ.get("REFERENCE", "2"))


class TellingSGD(torch.optim.SGD):
    """Prints the rate that it is about to step with."""

    number = 0

    def step(self, closure: Any = None) -> Any:
        sys.stdout.write(f"rate {self.number} {self.param_groups[0]['lr']!r}\n")
        sys.stdout.flush()
        return super().step(closure)


def main() -> None:
    run = spotguard.init(seed=3, save_every="100 steps")
    torch.manual_seed(3)
    model = nn.Linear(8, 1)
    optimizer = TellingSGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)
    loader = run.loader(
        torch.randn(50, 8),
        global_batch_size=4 * REFERENCE,
        micro_batch_size=2,
        lr_scaling="linear",
        reference_world_size=REFERENCE,
        lr_warmup_steps=3,
    )
    for step in run.steps(loader, epochs=3):
        optimizer.number = step.number
        for x in step:
            step.backward(0.01 * model(x).square().mean())
            if os.environ.get("HURT") == f"{step.number}:{run.rank}":
                os.kill(os.getpid(), signal.SIGTERM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
