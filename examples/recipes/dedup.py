# /// script
# dependencies = ["torch>=2.6", "numpy", "datasketch"]
# ///
"""Leave near-duplicates out before training, by datasketch's MinHash: fewer samples to pay for.

python examples/recipes/dedup.py
spotguard up examples/recipes/dedup.py --yes
"""

import random
import sysconfig
import time
from pathlib import Path

import torch
from datasketch import MinHash, MinHashLSH
from torch import nn
from torch.nn import functional as F

import spotguard.runtime as spotguard

ALIKE = 0.8
"""Jaccard similarity of their five-word shingles from which on two texts are one."""
BLOCK = 64


def corpus() -> list[str]:
    """Stands for crawled text: functions of the standard library, a third of them twice."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:20]
    whole = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    parts = [part for text in whole for part in text.split("\ndef ") if len(part) > 600]
    draw = random.Random(0)
    copies = [f"# copied\n{part}\n" for part in draw.sample(parts, len(parts) // 3)]
    return parts + copies


def signature(text: str) -> MinHash:
    words = text.split()
    shingles = {" ".join(words[i : i + 5]).encode() for i in range(max(1, len(words) - 4))}
    made = MinHash(num_perm=64)
    made.update_batch(list(shingles))
    return made


def without_duplicates(texts: list[str]) -> list[str]:
    """Return the first text of each group that is alike; the same ones on every rank."""
    index, kept = MinHashLSH(threshold=ALIKE, num_perm=64), []
    for number, text in enumerate(texts):
        made = signature(text)
        if not index.query(made):
            index.insert(str(number), made)
            kept.append(text)
    return kept


def main() -> None:
    run = spotguard.init(seed=11)
    texts, began = corpus(), time.perf_counter()
    kept = without_duplicates(texts)
    took = time.perf_counter() - began
    tokens = torch.tensor(list("\n".join(kept).encode()))
    blocks = tokens[: len(tokens) // BLOCK * BLOCK].view(-1, BLOCK)
    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(blocks, global_batch_size=128), epochs=1):
        for x in step:
            step.backward(F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(f"{len(kept)} of {len(texts)} texts are trained on, found in {took:.1f} s")


if __name__ == "__main__":
    main()
