# /// script
# dependencies = ["torch>=2.6", "numpy", "datasets"]
# [tool.spotguard]
# cache = ["data/tokens"]
# ///
"""Tokenise once, by `datasets`: the run store keeps the tokens, which are there on the next node.

python examples/recipes/token_cache.py
spotguard up examples/recipes/token_cache.py --yes
"""

import contextlib
import os
import sysconfig
import time
from pathlib import Path

import torch
from datasets import Dataset, load_from_disk
from torch import nn
from torch.nn import functional as F

import spotguard.runtime as spotguard

BLOCK = 64
TOKENS = Path("data/tokens")  # named by `cache` above, so a preemption does not lose it


def texts() -> list[str]:
    """Stands for a corpus: the standard library's own modules."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def tokenised(batch: dict) -> dict:
    """Return blocks of the batch's bytes; a real tokenizer takes minutes to hours here."""
    tokens = b"\n".join(text.encode() for text in batch["text"])
    ends = range(BLOCK + 1, len(tokens), BLOCK)
    return {"tokens": [list(tokens[end - BLOCK - 1 : end]) for end in ends]}


def dataset() -> Dataset:
    """Return the blocks; whoever comes first on a node makes them."""
    if not TOKENS.exists():
        raw = Dataset.from_dict({"text": texts()})
        made = raw.map(tokenised, batched=True, remove_columns=["text"])
        whole = TOKENS.with_name(f"tokens-{os.getpid()}")
        made.save_to_disk(str(whole))
        with contextlib.suppress(OSError):  # another rank was first
            whole.rename(TOKENS)  # at once: nobody reads, and no cache keeps, half of it
    return load_from_disk(str(TOKENS)).with_format("torch")


def main() -> None:
    run = spotguard.init(seed=9, save_every="20 steps")
    known, began = TOKENS.exists(), time.perf_counter()
    data = dataset()
    took = time.perf_counter() - began
    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(data, global_batch_size=32), total=40):
        for batch in step:
            tokens = batch["tokens"]
            logits = model(tokens[:, :-1])
            step.backward(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    how = "read back" if known else "made"
    print(f"{len(data)} blocks {how} in {took:.2f} s; loss {float(step.loss):.2f}")


if __name__ == "__main__":
    main()
