"""What every contestant of the survival matrix trains, and the word it leaves of each step."""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

import torch
from torch import nn

PROGRESS = "SURVIVAL_PROGRESS"
"""Folder with one file per rank: steps finished first and last by this process, int64 LE."""
RESUME = "SURVIVAL_RESUME"
"""The checkpoint to go on from, for frameworks that must be told."""
UNTIL = "SURVIVAL_UNTIL"
"""Steps in all; without it, more than a try can last."""
WORKERS = "SURVIVAL_WORKERS"
"""DataLoader workers per rank."""

RANKS = 2
GLOBAL_BATCH = 64
LEARNING_RATE = 1e-2
_ENDLESS = 100_000
_FORWARD_S = 0.005


class Model(nn.Module):
    """A small net with BatchNorm and dropout; its forward pass takes as long as a small GPT's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.Linear(64, 1)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the predictions, after a while."""
        time.sleep(_FORWARD_S)
        found: torch.Tensor = self.net(inputs)
        return found


def dataset() -> torch.utils.data.TensorDataset:
    """Return the same samples in each process."""
    torch.manual_seed(0)
    inputs = torch.randn(4096, 16)
    return torch.utils.data.TensorDataset(inputs, inputs @ torch.randn(16, 1))


def optimizer_of(
    model: nn.Module,
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return AdamW and its schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)


def workers() -> int:
    """Return the DataLoader workers that this rank shall have."""
    return int(os.environ.get(WORKERS, "0"))


def total_steps() -> int:
    """Return where to stop training."""
    return int(os.environ.get(UNTIL, str(_ENDLESS)))


class Progress:
    """This rank's file; outlives any signal, because it is mapped memory."""

    def __init__(self) -> None:
        path = Path(os.environ[PROGRESS], os.environ.get("RANK", "0"))
        path.write_bytes(bytes(16))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 16)
        self._first = 0

    def note(self, finished: int) -> None:
        """Say that `finished` steps are done, counted from the start of the run."""
        self._first = self._first or finished
        struct.pack_into("<qq", self._map, 0, self._first, finished)


def read_progress(folder: Path) -> dict[int, tuple[int, int]]:
    """Return the first and the last step that each rank finished; a rank without any is absent."""
    found = {}
    for path in folder.iterdir():
        content = path.read_bytes()
        if len(content) == 16 and any(content):
            first, last = struct.unpack("<qq", content)
            found[int(path.name)] = (first, last)
    return found
