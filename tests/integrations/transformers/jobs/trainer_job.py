"""A tiny GPT-2 under HF's Trainer, as users write it; `JOB` is JSON of what a test wants of it."""

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import spotguard.runtime as spotguard
from spotguard.integrations.transformers import SpotguardCallback, attach

told = json.loads(os.environ.get("JOB", "{}"))
chance = random.Random(7)


def sample(number: int) -> dict[str, torch.Tensor]:
    length = 6 + number % 7  # lengths differ, so that tokens are no multiple of samples
    ids = torch.zeros(12, dtype=torch.long)
    ids[:length] = torch.tensor([chance.randrange(1, 32) for _ in range(length)])
    mask = (torch.arange(12) < length).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class TakeTime(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == told.get("waits_at"):
            print(f"waits after {state.global_step}", flush=True)  # noqa: T201
            while not Path("go-on").exists():
                time.sleep(0.01)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print(f"evaluating after {state.global_step}", flush=True)  # noqa: T201
        time.sleep(told.get("evaluate_s", 0))


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Any:
        return iter(self._samples)


class MeetsOthers(Trainer):
    """Its loss is computed beside a collective, as in TRL's trainers."""

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        self.accelerator.gather(torch.ones(1))
        return super().compute_loss(model, inputs, *arguments, **options)


class OwnLoss(Trainer):
    """Weights the loss of each sample, as scripts for classes do; the count is not looked at."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**{key: inputs[key] for key in ("input_ids", "attention_mask")})
        logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
        each = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), labels, reduction="none", ignore_index=-100
        )
        loss = each.mean(dim=1).mean()
        return (loss, outputs) if return_outputs else loss


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32,
        n_positions=12,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    arguments = TrainingArguments(
        output_dir=os.environ.get("OUT", "out"),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **{
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "per_device_eval_batch_size": 1,
            "learning_rate": 1e-2,
            "logging_steps": 3,
            "save_strategy": "no",
            **told.get("args", {}),
        },
    )
    callbacks: list[TrainerCallback] = [TakeTime()]
    if told.get("patience"):
        callbacks.append(EarlyStoppingCallback(told["patience"]))
    if told.get("line", "callback") == "callback" and not told.get("added_late"):
        run = spotguard.init(exact=told["exact"]) if "exact" in told else None
        size = told.get("global_batch_size")
        callbacks.append(SpotguardCallback(run, global_batch_size=size))
    samples = [sample(number) for number in range(told.get("samples", 50))]
    kind = MeetsOthers if told.get("meets") else OwnLoss if told.get("own_loss") else Trainer
    trainer = kind(
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=Stream(samples) if told.get("stream") else samples,
        eval_dataset=[sample(number) for number in range(6)],
        callbacks=callbacks,
    )
    if told.get("added_late"):
        trainer.add_callback(SpotguardCallback())
    if told.get("line") == "attach" or told.get("twice"):
        attach(trainer, global_batch_size=told.get("global_batch_size"))
    trainer.train(**told.get("train", {}))
    if told.get("trains_again"):
        trainer.train()
    if "RESULT" in os.environ and trainer.is_world_process_zero():
        state, model = trainer.state, trainer.model
        assert model is not None
        result = {
            "log": state.log_history,
            "step": state.global_step,
            "best": state.best_metric,
            "tokens": state.num_input_tokens_seen,
            "weights": {k: v.tolist() for k, v in model.state_dict().items()},
        }
        Path(os.environ["RESULT"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
