# /// script
# dependencies = ["torch>=2.6", "numpy", "scipy", "scikit-learn"]
# [tool.spotguard]
# cache = ["data/augmented"]
# ///
"""Augment once, on a CPU and before the GPU is paid: the copies are kept, and only read after that.

python examples/recipes/offline_augmentation.py
spotguard up examples/recipes/offline_augmentation.py --yes
"""

import os
import time
from pathlib import Path

import numpy as np
import torch
from scipy import ndimage
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import spotguard.runtime as spotguard

KEPT = Path("data/augmented/digits.npy")  # below a folder that `cache` names
COPIES = 4


def augmented(image: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Return the image turned and moved a little."""
    turned = ndimage.rotate(image, draw.uniform(-10, 10), reshape=False, order=1)
    return ndimage.shift(turned, draw.uniform(-0.5, 0.5, size=2), order=1)


def write_copies(images: np.ndarray) -> None:
    """Write all copies, (copy, image, 8, 8), by a generator of their own: each rank's are alike."""
    draw = np.random.default_rng(0)
    copies = np.stack([[augmented(image, draw) for image in images] for _ in range(COPIES)])
    KEPT.parent.mkdir(parents=True, exist_ok=True)
    part = KEPT.with_name(f"digits-{os.getpid()}.part.npy")
    np.save(part, copies)
    part.replace(KEPT)


class Copies(torch.utils.data.Dataset):
    """Every copy of every image, mapped into memory: read when it is asked for."""

    def __init__(self, labels: np.ndarray) -> None:
        self.images = np.load(KEPT, mmap_mode="r")
        self.labels = labels

    def __len__(self) -> int:
        return COPIES * len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        copy, image = divmod(index, len(self.labels))
        return torch.from_numpy(self.images[copy, image].copy()).flatten(), self.labels[image]


def main() -> None:
    run = spotguard.init(seed=12, save_every="100 steps")
    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)
    made_s = 0.0
    if not KEPT.exists():
        began = time.perf_counter()
        write_copies(images[:1500])
        made_s = time.perf_counter() - began
    data = Copies(digits.target[:1500])
    began = time.perf_counter()
    for index in range(0, len(data), COPIES):
        _ = data[index]
    read_s = (time.perf_counter() - began) * COPIES
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(data, global_batch_size=128), total=100):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        told = model(torch.from_numpy(images[1500:]).flatten(1)).argmax(1).numpy()
    print(f"accuracy {(told == digits.target[1500:]).mean():.3f}")
    print(f"{len(data)} images: augmented in {made_s:.2f} s, read in {read_s:.2f} s")


if __name__ == "__main__":
    main()
