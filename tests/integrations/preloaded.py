"""Jobs of scripts on somebody else's trainer, each forked from a process that has it loaded."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.runtime.harness.processes import Jobs, Zygote

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.runtime.harness.processes import Job

FOLDER = Path(__file__).parent / "jobs"


class Story:
    """The attempts of one run: what they said, and what they left."""

    def __init__(self, folder: Path, attempts: list[list[Job]]) -> None:
        self.folder = folder
        self.attempts = attempts

    @property
    def told(self) -> list[str]:
        """Return what the first rank of each attempt said, without lines that are not the job's."""
        lines = [line for ranks in self.attempts for line in ranks[0].said.splitlines()]
        return [line for line in lines if line.startswith(("step", "epoch", "validating", "eval"))]

    @property
    def ends(self) -> list[str]:
        """Return the lines that the last attempt ended with."""
        lines = self.attempts[-1][0].said.splitlines()
        return [line for line in lines if line.startswith(("done", "best"))]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return what the script saved at its end."""
        found: dict[str, torch.Tensor] = torch.load(self.folder / "final.pt", weights_only=True)
        return found

    def samples(self) -> dict[int, list[int]]:
        """Return the samples of each step, over all ranks and attempts."""
        found: dict[int, list[int]] = {}
        for path in self.folder.glob("trace.*"):
            for line in path.read_text().splitlines():
                row = json.loads(line)
                found.setdefault(row["step"], []).extend(row["samples"])
        return {step: sorted(samples) for step, samples in sorted(found.items())}


class Stories:
    """Tells runs of one script, disturbed or not; each run in a folder of its own."""

    def __init__(self, zygote: Zygote, folder: Path, script: Path) -> None:
        self._zygote = zygote
        self._folder = folder
        self._script = script
        self._begun: list[Jobs] = []

    def of(self, script: Path, folder: Path) -> Stories:
        """Return what runs another script."""
        return Stories(self._zygote, folder, script)

    def start(self, jobs: Jobs, world: int, attempt: int = 1, **env: Any) -> list[Job]:
        """Start the ranks of one attempt, as torchrun does."""
        return jobs.start_ranks(
            world,
            script=self._script,
            each=lambda rank: {"SPOTGUARD_TRACE_SAMPLES": f"trace.{attempt}.{rank}"},
            TORCHELASTIC_RUN_ID="a-run",
            LOCAL_WORLD_SIZE=world,
            HF_HUB_OFFLINE=1,
            FOLDER=".",
            **env,
        )

    def jobs(self) -> Jobs:
        """Return what starts jobs in a new folder."""
        folder = self._folder / f"run-{len(self._begun)}"
        folder.mkdir()
        self._begun.append(Jobs(self._zygote, folder))
        return self._begun[-1]

    def tell(
        self,
        worlds: Sequence[int],
        words: Sequence[str | dict[str, Any]] = (),
        **env: Any,
    ) -> Story:
        """Run attempts on `worlds` ranks; each but the last is told to stop when it says a word.

        With more environment in the place of a word it runs to the end that this gives it.
        """
        jobs = self.jobs()
        attempts = []
        for number, (world, given) in enumerate(zip(worlds, [*words, None], strict=True)):
            word = given if isinstance(given, str) else None
            pace: dict[str, Any] = {"PACE_S": 0.15, "VAL_PACE_S": 0.15} if word else {}
            pace |= given if isinstance(given, dict) else {}
            ranks = self.start(jobs, world, number + 1, **{**env, **pace})
            if word is not None:
                ranks[number % world].wait_for(word)
                ranks[number % world].kill(signal.SIGTERM)
            codes = [rank.wait() for rank in ranks]
            assert codes == [0 if word is None else 75] * world, ranks[0].said
            attempts.append(ranks)
        return Story(jobs.folder, attempts)

    def close(self) -> None:
        """End what is left of all jobs."""
        for job in (job for jobs in self._begun for job in jobs.started):
            if not job.is_over():
                job.kill_tree(signal.SIGKILL)
                job.wait()


def stories(folder: Path, script: str, *preloaded: str) -> Iterator[Stories]:
    """Yield what runs a script; nothing of it is left then."""
    zygote = Zygote(*preloaded)
    made = Stories(zygote, folder, FOLDER / script)
    yield made
    made.close()
    zygote.close()


def same(one: Story, other: Story, *, within: float = 0.0) -> bool:
    """Return whether two runs ended with the same weights, to the bit or within a tolerance."""
    mine, theirs = one.weights(), other.weights()
    return mine.keys() == theirs.keys() and all(
        float((mine[name].double() - theirs[name].double()).abs().max()) <= within for name in mine
    )
