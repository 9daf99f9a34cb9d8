"""Lightning with spotguard's callback in the survival matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.survival.ours import Spotguard

if TYPE_CHECKING:
    from pathlib import Path


class LightningWithSpotguard(Spotguard):
    """`Trainer(callbacks=[SpotguardCallback()])`, and nothing else."""

    name = "Lightning + spotguard"
    package = "lightning"
    settings = "`callbacks=[SpotguardCallback()]`; no periodic saves"
    job = "benchmarks.survival.lightning_ours_job"

    def variables(self, output: Path) -> dict[str, str]:
        """Say as well that torchrun started it, also where one process resumes alone."""
        return {**super().variables(output), "TORCHELASTIC_RUN_ID": "survival"}
