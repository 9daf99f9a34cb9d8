"""A script of the shape of transformers' `*_no_trainer.py`, and our lines in it.

EPOCHS, STEPS, ACCUMULATE, SPLIT and PRECISION are its arguments; PACE_S is added to each batch.
SHARED has it share out a batch over the processes. OWN_SCHEDULE has it step the schedule by itself.
HOOK has it save averaged weights by a hook (`hook`), or registered, too (`registered`).
"""

import math
import os
import sys
import time
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spotguard.integrations.accelerate import SpotguardDataLoader


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    accumulate = int(os.environ.get("ACCUMULATE", "1"))
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulate,
        mixed_precision=os.environ.get("PRECISION", "no"),
        cpu=True,
        dataloader_config=DataLoaderConfiguration(split_batches=bool(os.environ.get("SPLIT"))),
    )
    set_seed(3)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 8, generator=generator)
    samples = TensorDataset(x, x @ torch.randn(8, 1, generator=generator))
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1))
    beside = nn.Parameter(torch.ones(1))  # of a loss, for example: it is not prepared
    size = 16 // accelerator.num_processes if os.environ.get("SHARED") else 4
    train_dataloader: Any = DataLoader(samples, shuffle=True, batch_size=size)
    eval_dataloader = DataLoader(torch.utils.data.Subset(samples, range(24)), batch_size=4)
    train_dataloader = SpotguardDataLoader(accelerator, train_dataloader, save_every="3 steps")
    optimizer = torch.optim.AdamW([*model.parameters(), beside], 1e-2)
    max_steps = int(os.environ.get("STEPS", "0"))
    overrode = not max_steps
    if overrode:
        max_steps = 3 * math.ceil(len(train_dataloader) / accumulate)
    steps_itself = bool(os.environ.get("OWN_SCHEDULE"))
    total = max_steps if overrode or steps_itself else max_steps * accelerator.num_processes
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: max(0.0, 1 - step / total)
    )
    prepared = accelerator.prepare(model, optimizer, train_dataloader, eval_dataloader)
    model, optimizer, train_dataloader, eval_dataloader = prepared
    if not steps_itself:
        lr_scheduler = accelerator.prepare(lr_scheduler)
    if hook := os.environ.get("HOOK"):
        ema = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 1))
        accelerator.register_save_state_pre_hook(lambda *_: ema.state_dict())
        if hook == "registered":
            accelerator.register_for_checkpointing(ema)
    steps_per_epoch = math.ceil(len(train_dataloader) / accumulate)
    if overrode:
        max_steps = 3 * steps_per_epoch
    epochs = math.ceil(max_steps / steps_per_epoch)
    for epoch in train_dataloader.epochs(epochs):
        completed_steps = train_dataloader.completed_steps
        model.train()
        for inputs, targets in train_dataloader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs) * beside, targets)
                dies = completed_steps == int(os.environ.get("DIES_AT", "-1"))
                if dies and accelerator.is_main_process:
                    loss.register_hook(lambda _: os._exit(9))  # type: ignore[no-untyped-call]
                accelerator.backward(loss)
                optimizer.step()
                if accelerator.sync_gradients or not steps_itself:
                    lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed_steps += 1
                say(
                    f"step {completed_steps} epoch {epoch} rate {lr_scheduler.get_last_lr()[0]:.6f}"
                )
                time.sleep(float(os.environ.get("PACE_S", "0")))
            if completed_steps >= max_steps:
                break
        model.eval()
        losses = []
        for inputs, targets in train_dataloader.evaluate(eval_dataloader):
            with torch.no_grad():
                losses.append(
                    accelerator.gather_for_metrics(
                        nn.functional.mse_loss(model(inputs), targets, reduction="none")
                    )
                )
            say(f"evaluating after {completed_steps}")
            time.sleep(float(os.environ.get("PACE_S", "0")))
        say(f"epoch {epoch} ends at {completed_steps}")
    mean = torch.cat(losses).mean() if losses else torch.zeros(())
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "final.pt")
    say(f"done {completed_steps} {mean:.5f}")


if __name__ == "__main__":
    main()
