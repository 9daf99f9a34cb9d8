# /// script
# dependencies = ["torch>=2.6", "numpy", "scikit-learn", "webdataset"]
# ///
"""Tar shards by webdataset: read from end to end, and a resume goes on at the very next sample.

python examples/recipes/webdataset_shards.py
spotguard up examples/recipes/webdataset_shards.py --yes
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import webdataset as wds
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import spotguard.runtime as spotguard

FOLDER = Path("data/shards")
SHARDS = 8


def write_shards() -> None:
    """Stands for shards in a bucket, of hundreds of megabytes each, which are written once."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    for shard in range(SHARDS):
        path = FOLDER / f"{shard:05d}.tar"
        part = path.with_suffix(".part")
        with wds.TarWriter(str(part)) as tar:
            for i in range(shard, 1500, SHARDS):
                image = (digits.images[i] / 16).astype(np.float32)
                tar.write({"__key__": f"{i:05d}", "npy": image, "cls": int(digits.target[i])})
        part.rename(path)


class Part:
    """Every so-manieth tar, over and over; its place is how many samples it gave."""

    def __init__(self, shard: int, shards: int) -> None:
        self.paths = [str(path) for path in sorted(FOLDER.glob("*.tar"))[shard::shards]]
        self.given = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        self.given, skip = 0, self.given
        tars = wds.WebDataset(self.paths, shardshuffle=False, nodesplitter=None, empty_check=False)
        for image, label in tars.decode().to_tuple("npy", "cls"):
            self.given += 1
            if self.given > skip:
                yield torch.from_numpy(image).flatten(), label
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def open_part(shard: int, shards: int) -> Part:
    return Part(shard, shards)


def main() -> None:
    run = spotguard.init(seed=10, save_every="20 steps")
    if not any(FOLDER.glob("*.tar")):
        write_shards()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    # As many parts as micro-batches in a step, whoever reads them: exact on any number of ranks.
    loader = run.loader(open_part, global_batch_size=64, micro_batch_size=16)
    for step in run.steps(loader, total=100):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    digits = load_digits()
    with torch.no_grad():
        x = torch.tensor(digits.data[1500:] / 16, dtype=torch.float32)
        right = (model(x).argmax(1).numpy() == digits.target[1500:]).mean()
    print(f"accuracy {right:.3f} from {SHARDS} tar shards of 1500 samples in all")


if __name__ == "__main__":
    main()
