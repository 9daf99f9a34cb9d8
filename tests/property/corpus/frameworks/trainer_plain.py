"""HF's Trainer, an evaluation each epoch."""
# property: server=transformers

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from spotguard.integrations.transformers import SpotguardCallback


def sample(number):
    length = 6 + number % 5
    ids = torch.zeros(10, dtype=torch.long)
    ids[:length] = torch.randint(1, 32, (length,), generator=torch.Generator().manual_seed(number))
    mask = (torch.arange(10) < length).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


torch.manual_seed(0)
config = GPT2Config(
    vocab_size=32, n_positions=10, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
)
arguments = TrainingArguments(
    output_dir="out",
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
    save_strategy="no",
    logging_steps=3,
    learning_rate=1e-2,
    adam_epsilon=1e-3,
    per_device_train_batch_size=2,
    max_steps=10,
    eval_strategy="steps",
    eval_steps=4,
)
trainer = Trainer(
    GPT2LMHeadModel(config),
    arguments,
    train_dataset=[sample(number) for number in range(30)],
    eval_dataset=[sample(number) for number in range(6)],
    callbacks=[SpotguardCallback(global_batch_size=6)],
)
trainer.train()
