"""A small training whose global batch follows the ranks; prints the rate of each optimizer step.

HURT is `STEP:RANK`: that rank gets SIGTERM in the midst of that step. From there on steps take
their time, so that none finishes before it has heard.
"""

import os
import signal
import sys
import time
from typing import Any

import torch
from torch import nn

import spotguard.runtime as spotguard

STEP, RANK = os.environ.get("HURT", ":").split(":")
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
            if (str(step.number), str(run.rank)) == (STEP, RANK):
                os.kill(os.getpid(), signal.SIGTERM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        if STEP and step.number >= int(STEP):
            time.sleep(0.1)


if __name__ == "__main__":
    main()
