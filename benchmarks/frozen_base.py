"""What a save costs that leaves a frozen base out: `python -m benchmarks.frozen_base`.

A model of 1 GB that is frozen, with adapters of 4 MB that learn with AdamW (LoRA's proportions),
tracked as a whole, with `frozen="skip"`, and with `base=` as a file that the script has of it. Each
saves and restores in one process, in turn. A restore of the last one is made twice: into a model
that has loaded its base, whose hashes alone are proven, and into one that has not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from spotguard.checkpoint.lineage import claim_attempt
from spotguard.checkpoint.manifest import load_manifest
from spotguard.checkpoint.outside import BaseFiles
from spotguard.checkpoint.retention import Retention
from spotguard.events import keys
from spotguard.events.states import CheckpointKind
from spotguard.runtime.checkpoint import restore as restoring
from spotguard.runtime.checkpoint.saver import Saver
from spotguard.runtime.distributed.rendezvous import Alone
from spotguard.runtime.state.tracked import Tracked, tracked
from spotguard.storage import FileStore

WIDTH = 1024
STEPS = 7


class Measured(NamedTuple):
    """Of one way to track."""

    first_s: float
    """Until the base is stored, if there is one."""
    save_s: list[float]
    stall_s: list[float]
    cpu_s: list[float]
    """Of all threads: what others on the machine do changes it little."""
    size_bytes: int
    restore_s: float
    anew_s: float
    """Of a restore into a model that holds nothing of it yet."""
    base_bytes: int
    """What the base takes in the store."""


class Adapted(nn.Module):
    """Frozen layers with a low-rank part beside each, which learns."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.base.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(2, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of all layers for `x` of shape (batch, WIDTH)."""
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = base(x) + up(down(x))
        return x


class _Attempt:
    def __init__(
        self,
        folder: Path,
        number: int,
        layers: int,
        *,
        skip: bool,
        base: Path | None = None,
        seed: int = 0,
    ) -> None:
        torch.manual_seed(seed)
        self.model = Adapted(layers)
        learns = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(learns, lr=1e-4)
        files = None
        if base is not None:
            if not base.exists():
                save_file(self.model.base.state_dict(), base)
            files = BaseFiles([base])
        self.objects: dict[str, Tracked] = {
            "model": tracked("model", self.model, skips_frozen=skip, base=files),
            "optimizer": tracked("optimizer", self.optimizer),
        }
        self.store = FileStore(folder)
        self.saver = Saver(
            self.store, run_id="bench", attempt=number, rank=0, world_size=1, coordinator=Alone(),
            retention=Retention(), save_random=False, on_saved=lambda *_: None,
            on_failed=lambda _, problem: _raise(problem),
        )  # fmt: skip
        began = time.perf_counter()
        found = restoring.restore(self.store, Alone(), 0, 1, self.objects)
        self.restore_s = time.perf_counter() - began
        claim_attempt(self.store, number, found.prefix)
        self.saver.parent = found.prefix
        self.saver.take_base(self.objects, found.bases)

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 0.1)
        self.optimizer.step()

    def save(self, step: int) -> tuple[float, float, float]:
        began, cpu_began = time.perf_counter(), time.process_time()
        capture = self.saver.capture(step, CheckpointKind.PERIODIC, self.objects, {})
        self.saver.save_in_background(capture, overlap=True)
        stall_s = time.perf_counter() - began + self.saver.wait_copied()
        self.saver.wait()
        return time.perf_counter() - began, stall_s, time.process_time() - cpu_began


def _raise(problem: Exception) -> None:
    raise problem


def measured(folder: Path, layers: int, *, skip: bool, base: Path | None = None) -> Measured:
    """Train, save and restore; each save is of a state that has changed."""
    attempt = _Attempt(folder, 1, layers, skip=skip, base=base)
    attempt.step()
    began = time.perf_counter()
    attempt.saver.warm(attempt.objects)
    attempt.saver.wait()
    while not attempt.saver.may_save(1):  # the base is stored beside all that
        time.sleep(0.01)
    first_s = time.perf_counter() - began
    saves = []
    for step in range(1, STEPS + 1):
        attempt.step()
        saves.append(attempt.save(step))
    size_bytes = load_manifest(attempt.store, keys.checkpoint(STEPS, 1)).size_bytes
    times = []
    for number, seed in ((2, 0), (3, 1)):
        again = _Attempt(folder, number, layers, skip=skip, base=base, seed=seed)
        times.append(again.restore_s)
        if not all(map(torch.equal, again.model.parameters(), attempt.model.parameters())):
            raise AssertionError("what was restored is not what was saved")
        del again
    return Measured(
        first_s,
        [save_s for save_s, _, _ in saves],
        [stall_s for _, stall_s, _ in saves],
        [cpu_s for _, _, cpu_s in saves],
        size_bytes,
        times[0],
        times[1],
        sum(info.size_bytes for info in attempt.store.list(keys.FROZEN)),
    )


def main() -> None:
    """Print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--layers", type=int, default=256, help="of 4 MB each")
    options.add_argument("--folder", type=Path, help="where to save; a temporary one by default")
    given = options.parse_args()
    base = given.layers * WIDTH * (WIDTH + 1) * 4
    print(f"a frozen base of {base / 1e9:.2f} GB, {STEPS} saves each\n")
    print(
        "| tracked | a save holds | takes (median) | worst | holds up training | CPU time "
        "| base in the store | before | restore | anew |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in ("as a whole", 'frozen="skip"', "base="):
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            file = Path(folder) / "base.safetensors" if name == "base=" else None
            runs = Path(folder) / "runs"
            one = measured(runs, given.layers, skip=name != "as a whole", base=file)
        print(
            f"| {name} | {one.size_bytes / 1e6:.1f} MB | {statistics.median(one.save_s):.3f} s "
            f"| {max(one.save_s):.3f} s | {1e3 * statistics.median(one.stall_s):.1f} ms "
            f"| {1e3 * statistics.median(one.cpu_s):.0f} ms | {one.base_bytes / 1e6:.2f} MB "
            f"| {one.first_s:.2f} s | {one.restore_s:.2f} s | {one.anew_s:.2f} s |"
        )
    print(f"\nload average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
