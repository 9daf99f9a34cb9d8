"""A tiny GPT-2 under HF's Trainer, as users write it; `JOB` is JSON of what a test wants of it."""

import copy
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


class OwnLoader(Trainer):
    """Makes batches of three, whatever the argument says."""

    def get_train_dataloader(self) -> Any:
        dataset: Any = self.train_dataset
        return self.accelerator.prepare(
            torch.utils.data.DataLoader(dataset, 3, shuffle=True, collate_fn=self.data_collator)
        )


class Pairs:
    """Batches of neighbours, in an order of the epoch's own; as those of sentence-transformers."""

    batch_size = 3

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.size // 3)

    def __iter__(self) -> Any:
        starts = list(range(0, self.size, 3))
        random.Random(self.epoch).shuffle(starts)
        return ([*range(start, min(start + 3, self.size))] for start in starts)


class OwnBatches(Trainer):
    """Has a batch sampler, and takes something out of each batch."""

    def get_train_dataloader(self) -> Any:
        data: Any = self.train_dataset
        return self.accelerator.prepare(
            torch.utils.data.DataLoader(
                data, batch_sampler=Pairs(len(data)), collate_fn=self.data_collator
            )
        )

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        labels = inputs.pop("labels")
        return super().compute_loss(model, {**inputs, "labels": labels}, *args, **options)


class FollowsModel(TrainerCallback):
    """Moves a second model after the first, as `sync_ref_model=True` does."""

    def __init__(self, reference: torch.nn.Module) -> None:
        self.reference = reference

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        weights = given["model"].parameters()
        for mine, theirs in zip(self.reference.parameters(), weights, strict=True):
            mine.data.mul_(0.5).add_(theirs.data, alpha=0.5)


class OwnHead(Trainer):
    """Its loss has weights, and is held close to a second model; neither is the model's."""

    def __init__(self, model: Any, *args: Any, **options: Any) -> None:
        self.head = torch.nn.Linear(32, 4)
        self.reference = copy.deepcopy(model).eval()
        super().__init__(model, *args, **options)
        self.add_callback(FollowsModel(self.reference))

    def create_optimizer(self, *args: Any) -> Any:
        optimizer = super().create_optimizer(*args)
        if len(optimizer.param_groups) < 3:
            optimizer.add_param_group({"params": list(self.head.parameters())})
        return optimizer

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        given = {key: inputs[key] for key in ("input_ids", "attention_mask")}
        logits = model(**given).logits
        with torch.no_grad():
            others = self.reference(**given).logits
        kinds = inputs["input_ids"].sum(1) % 4
        return torch.nn.functional.cross_entropy(self.head(logits.mean(1)), kinds) + (
            (logits - others).square().mean()
        )


class Rollouts(Trainer):
    """Draws what it trains on for a whole step at once, as TRL's trainers for RL do.

    Its loader gives that many samples with each micro-batch, and the same ones for each of a step.
    """

    loss_is_scaled_for_ga = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_iterations = told.get("num_iterations", 1)
        self.kept: Any = None
        self.micro_step = 0
        self.model_accepts_loss_kwargs = False
        self.compute_loss_func: Any = "the loss is scaled"

    def get_train_dataloader(self) -> Any:
        uses, data = self.args.gradient_accumulation_steps, self.train_dataset
        size = self.args.per_device_train_batch_size * uses
        whole = size * self.args.world_size
        order = [
            index
            for start in range(0, len(data) - whole + 1, whole)  # type: ignore[arg-type]
            for _ in range(uses)
            for index in range(start, start + whole)
        ]
        return self.accelerator.prepare(
            torch.utils.data.DataLoader(
                data,  # type: ignore[arg-type]
                size,
                sampler=InThisOrder(order),
                collate_fn=self.data_collator,
            )
        )

    def _prepare_inputs(self, inputs: Any) -> Any:
        uses = self.args.gradient_accumulation_steps
        if self.micro_step % (uses * told.get("lasts", 1)) == 0:
            lengths = torch.rand(len(inputs["labels"]), 1)
            self.kept = inputs | {"labels": inputs["labels"].masked_fill(lengths < 0.3, 5)}
            everybody = self.accelerator.gather(inputs["input_ids"].sum(1))
            print(f"rollouts of {sorted(everybody.tolist())}", flush=True)  # noqa: T201
        part = self.micro_step % uses
        return {key: value.chunk(uses)[part] for key, value in self.kept.items()}

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        self.micro_step += 1
        return model(**inputs).loss / self.current_gradient_accumulation_steps


class InThisOrder(torch.utils.data.Sampler[int]):
    def __init__(self, order: list[int]) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Any:
        return iter(self.order)


KINDS: dict[str, type[Trainer]] = {
    "meets": MeetsOthers,
    "own_loss": OwnLoss,
    "own_loader": OwnLoader,
    "own_batches": OwnBatches,
    "own_head": OwnHead,
    "rollouts": Rollouts,
}


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
    kind = next((KINDS[name] for name in KINDS if told.get(name)), Trainer)
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
        parts = {name: getattr(trainer, name, None) for name in ("head", "reference")}
        others = {
            f"{name}.{key}": value.tolist()
            for name, part in parts.items()
            for key, value in (part.state_dict().items() if part is not None else ())
        }
        result = {
            "log": state.log_history,
            "step": state.global_step,
            "best": state.best_metric,
            "tokens": state.num_input_tokens_seen,
            "weights": {k: v.tolist() for k, v in model.state_dict().items()} | others,
        }
        Path(os.environ["RESULT"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
