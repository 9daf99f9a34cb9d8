"""What our callback adds to a step of Lightning's Trainer, beside the bare one in the same process.

    python -m benchmarks.step_overhead.lightning_trainer

Processor time of the main thread, since others may use the machine; rounds alternate. The model is
small, so what is seen is bookkeeping: it is told in microseconds, and as a part of 20 ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

STEP_S = 0.02
_WARM = 50


def measure(*, with_callback: bool, steps: int) -> float:
    """Return the main thread's processor seconds of a step: the median over stretches of 25."""
    import warnings

    warnings.filterwarnings("ignore")
    import lightning.pytorch as pl
    import torch
    from torch import nn

    torch.set_num_threads(1)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
            self.at: list[float] = []

        def training_step(self, batch: Any, _: int) -> Any:
            self.at.append(time.thread_time())
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    callbacks = []
    if with_callback:
        from spotguard.integrations.lightning import SpotguardCallback

        callbacks = [SpotguardCallback(save_every="100000 steps")]
    x = torch.randn(6400, 32)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    module = Module()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=16, shuffle=True))
    stretches = [
        (after - before) / 25
        for before, after in zip(module.at[_WARM::25], module.at[_WARM + 25 :: 25], strict=False)
    ]
    return statistics.median(stretches)


def main() -> None:
    """Alternate the two and print the difference with its spread."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=650)
    parser.add_argument("--one", choices=("bare", "ours"))
    options = parser.parse_args()
    if options.one:
        print(f"step_s {measure(with_callback=options.one == 'ours', steps=options.steps)}")
        return
    added = []
    for number in range(options.rounds):
        found = {}
        for one in ("bare", "ours") if number % 2 else ("ours", "bare"):
            with tempfile.TemporaryDirectory() as folder:
                done = subprocess.run(
                    [sys.executable, "-m", __spec__.name, "--one", one],
                    env={**os.environ, "SPOTGUARD_STORE": folder},
                    capture_output=True,
                    text=True,
                    check=True,
                )
            [line] = [row for row in done.stdout.splitlines() if row.startswith("step_s ")]
            found[one] = float(line.split()[1])
        added.append(found["ours"] - found["bare"])
        print(
            f"bare {1e6 * found['bare']:.0f} us, ours {1e6 * found['ours']:.0f} us, "
            f"added {1e6 * added[-1]:.0f} us = {added[-1] / STEP_S:.2%} of 20 ms",
            flush=True,
        )
    middle = statistics.median(added)
    print(
        f"added {1e6 * middle:.0f} us [{1e6 * min(added):.0f}..{1e6 * max(added):.0f}], "
        f"{middle / STEP_S:.2%} of a step of 20 ms; load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
