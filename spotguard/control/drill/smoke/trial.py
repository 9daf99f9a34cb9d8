"""A process of the script that measures something, writes it down and ends, in a smoke's way."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spotguard.control.drill.smoke.places import Code
from spotguard.control.drill.smoke.process import Stint, run_stint
from spotguard.control.drill.smoke.run import lacking, room_for_smoke
from spotguard.control.drill.smoke.verdict import Stopped, judge
from spotguard.errors import EnvironmentFailure, SmokeFailed

if TYPE_CHECKING:
    from spotguard.control.drill.smoke.process import Facts
    from spotguard.errors import SpotguardError
    from spotguard.spec.model import JobSpec

LIMIT_S: Final = 120.0
_FOREVER = 10**9
_FILE = "measured.json"
WRITTEN_TO: Final = f"{{room}}/{_FILE}"
"""In a variable of the process: the path at which it writes down what it measured."""


@dataclass(frozen=True)
class Trial:
    """How such a process has ended."""

    spec: JobSpec
    code: Code
    facts: Facts
    written: bytes | None
    """What it wrote down; None if it did not."""

    def why_not(self, subject: str, otherwise: str) -> SpotguardError:
        """Return why nothing was measured of the subject; `otherwise`: nothing is wrong with it."""
        verdict = judge(self.facts, self.code, stop_after=_FOREVER, gpus=self.spec.gpus is not None)
        if isinstance(verdict, Stopped):
            hint = verdict.hint.replace("--no-smoke", "`up --no-smoke`")
            return SmokeFailed(verdict.what, hint=hint)
        why = otherwise if verdict is None else verdict.why.replace(" (--smoke-limit)", "")
        return cannot_be_tried(subject, why)


def check_possible(spec: JobSpec, subject: str) -> None:
    """Let pass a job whose script can be tried here; else raise `EnvironmentFailure`."""
    if lack := lacking(spec):
        raise cannot_be_tried(subject, lack)


def cannot_be_tried(subject: str, why: str) -> EnvironmentFailure:
    """Return the error that says so."""
    return EnvironmentFailure(f"{subject} cannot be tried: {why}.")


def run_trial(spec: JobSpec, variable: str, value: str) -> Trial:
    """Run the script with a variable that asks it to measure. Blocks for two minutes at most."""
    folder = room_for_smoke()
    try:
        stint = Stint(
            attempt=1,
            stop_after=_FOREVER,
            whole_batches=True,
            limit_s=LIMIT_S,
            variables={variable: value},
        )
        facts = run_stint(spec, folder, stint)
        found = next(iter(folder.glob(f"*/{_FILE}")), None)
        written = None if found is None else found.read_bytes()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Trial(spec, Code(spec.script, spec.workdir), facts, written)
