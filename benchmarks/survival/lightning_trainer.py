"""Lightning in the survival matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.survival.contestant import Contestant, Found

if TYPE_CHECKING:
    from pathlib import Path


class Lightning(Contestant):
    """`Trainer` with a checkpoint on the exception that its SIGTERM handler raises."""

    name = "Lightning"
    package = "lightning"
    settings = "`ModelCheckpoint(save_on_exception=True)`, persistent workers; no periodic saves"
    job = "benchmarks.survival.lightning_job"

    def variables(self, output: Path) -> dict[str, str]:
        """Name the folder."""
        return {"SURVIVAL_OUTPUT": str(output)}

    def find(self, output: Path) -> Found:
        """Return the newest checkpoint; it is written under another name until it is complete."""
        steps = {
            int(path.stem.partition("=")[2].split("-")[0]): path
            for path in output.glob("step=*.ckpt")
        }
        if not steps:
            return Found(problem="nothing was saved")
        return Found(step=max(steps), where=str(steps[max(steps)]))
