"""Lightning's own resume in the middle of an epoch, by real jobs: it needs its process group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.elastic_rivals.ways import RANKS, STEPS, Saved, Way, new_folder, together


class Lightning(Way):
    """`Trainer.fit(ckpt_path=...)` with a plain `DataLoader`, from `ModelCheckpoint`'s file."""

    name = "Lightning"
    package = "lightning"
    quick = False
    stateful: ClassVar[bool] = False

    def interrupt(self, batch: int) -> Saved:
        """Train the first steps; the place is in the file that Lightning saved."""
        folder = new_folder()
        read = self._train(folder, RANKS, batch, steps=STEPS, resume=None)
        return Saved(read=together(read), own=[str(Path(folder, "saved.ckpt"))])

    def loaders(self, ranks: int, batch: int, saved: Saved | None) -> list[Any]:
        """Return what each rank read until the end of the epoch."""
        resume = saved.own[0] if saved else None
        return self._train(new_folder(), ranks, batch, steps=0, resume=resume)

    def _train(
        self, folder: str, ranks: int, batch: int, *, steps: int, resume: str | None
    ) -> list[Any]:
        job = {
            "folder": folder, "ranks": ranks, "batch": batch, "steps": steps, "resume": resume,
            "stateful": self.stateful,
        }  # fmt: skip
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *(f"--nproc-per-node={ranks}", "-m", "benchmarks.elastic_rivals.lightning_job"),
                json.dumps(job),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the job of {ranks} ranks failed: {done.stderr[-2000:]}")
        said = [Path(folder, f"read-{rank}.json") for rank in range(ranks)]
        return [json.loads(file.read_text(encoding="utf-8")) for file in said]


class LightningStateful(Lightning):
    """The same with torchdata's `StatefulDataLoader` and sampler, whose state Lightning saves."""

    name = "Lightning with StatefulDataLoader"
    stateful = True
