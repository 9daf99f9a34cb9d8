"""A tiny GPT-2 under HF's Trainer: what users write, with everything that a run may be asked for.

Told by variables, so that one script serves all tests: see `Told` in ../transformers/harness.py.
"""

import json
import os
import random
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from spotguard.integrations.transformers import SpotguardCallback

told = json.loads(os.environ.get("JOB", "{}"))
chance = random.Random(7)


def sample(number: int) -> dict[str, torch.Tensor]:
    length = 6 + number % 7  # lengths differ, so that tokens are no multiple of samples
    ids = torch.full((12,), 0)
    ids[:length] = torch.tensor([chance.randrange(1, 32) for _ in range(length)])
    mask = (torch.arange(12) < length).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class NoteSteps(TrainerCallback):
    def on_step_end(self, args, state, control, **_):  # type: ignore[no-untyped-def]
        if seconds := told.get("step_s"):
            import time

            time.sleep(seconds)


torch.manual_seed(0)
config = GPT2Config(
    vocab_size=32, n_positions=12, n_embd=16, n_layer=1, n_head=2, **told.get("config", {})
)
trainer = Trainer(
    GPT2LMHeadModel(config),
    TrainingArguments(
        output_dir=os.environ.get("OUT", "out"),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **{
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "logging_steps": 3,
            "save_strategy": "no",
            "max_steps": 12,
            **told.get("args", {}),
        },
    ),
    train_dataset=[sample(i) for i in range(told.get("samples", 50))],
    eval_dataset=[sample(i) for i in range(10)],
    callbacks=[SpotguardCallback(**told.get("spotguard", {})), NoteSteps()],
)
trainer.train()
if "RESULT" in os.environ and trainer.is_world_process_zero():
    Path(os.environ["RESULT"]).write_text(
        json.dumps(
            {
                "log": trainer.state.log_history,
                "step": trainer.state.global_step,
                "epoch": trainer.state.epoch,
                "best": trainer.state.best_metric,
                "weights": {k: v.tolist() for k, v in trainer.model.state_dict().items()},
            }
        )
    )
