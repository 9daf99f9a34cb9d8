"""The Trainer of Hugging Face in the survival matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.survival.contestant import Contestant, Found
from benchmarks.survival.ours import Spotguard

if TYPE_CHECKING:
    from pathlib import Path

_INCOMPLETE = "checkpoint-is-incomplete.txt"


class HuggingFace(Contestant):
    """`Trainer` with its just-in-time checkpoint on SIGTERM."""

    name = "HF Trainer"
    package = "transformers"
    settings = "`enable_jit_checkpoint=True`, persistent workers; no periodic saves"
    job = "benchmarks.survival.hf_job"

    def variables(self, output: Path) -> dict[str, str]:
        """Name the folder, and keep off the network."""
        return {"SURVIVAL_OUTPUT": str(output), "HF_HUB_OFFLINE": "1"}

    def find(self, output: Path) -> Found:
        """Return the newest checkpoint without the mark of an unfinished one."""
        steps = {int(path.name.split("-")[1]): path for path in output.glob("checkpoint-*")}
        complete = [step for step, path in steps.items() if not (path / _INCOMPLETE).exists()]
        if complete:
            return Found(step=max(complete), where=str(steps[max(complete)]))
        return Found(problem="only an incomplete checkpoint" if steps else "nothing was saved")


class HuggingFaceWithSpotguard(Spotguard):
    """The same `Trainer` with `SpotguardCallback()`, told what spotguard's own loop is told."""

    name = "HF Trainer + spotguard"
    package = "transformers"
    settings = "`callbacks=[SpotguardCallback()]`; no periodic saves"
    job = "benchmarks.survival.hf_job"

    def variables(self, output: Path) -> dict[str, str]:
        """Name the run, its store and a folder that stays empty, and keep off the network."""
        return {
            **super().variables(output),
            "SURVIVAL_WITH_SPOTGUARD": "1",
            "SURVIVAL_OUTPUT": str(output.with_name("unused")),
            "HF_HUB_OFFLINE": "1",
        }
