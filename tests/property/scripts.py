"""The scripts that the property test strikes: all below `corpus/`, and jobs of other tests.

A script says in a comment what it promises where that is less than all:

    # property: elastic=samples worlds=1-2 server=lightning

- `elastic`: what another number of ranks promises. `bits`: the same to the last bit; `rounding`
  (the default): the same but for rounding; `first`: the same but for rounding as on the ranks that
  it began with; `samples`: the same samples in each step; `once`: each sample once an epoch;
  `refused`: nothing, as the data are read from their beginning there.
- `worlds`: the numbers of ranks that it can have; 1-4 by default.
- `server`: the fork server that has loaded what it imports; `base` by default.
- `refused`: it ends by a refusal with a way out, undisturbed, too; a word of that sentence.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
TESTS = Path(__file__).parents[1]
_ALL = ("tests.property.child.rank", "tenacity", "psutil", "torch.profiler")
SERVERS = {
    "base": (*_ALL, "torch.optim.swa_utils"),
    "sharded": (*_ALL, "torch.distributed.fsdp", "torch.distributed.device_mesh"),
    "compiled": (*_ALL, "torch._dynamo", "torch._inductor.compile_fx"),
    "accelerate": (*_ALL, "accelerate", "accelerate.optimizer"),
    "lightning": (*_ALL, "lightning.pytorch"),
    "transformers": (
        *(*_ALL, "accelerate.optimizer", "torchdata.stateful_dataloader"),
        *("transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
    ),
}
"""What each fork server has loaded: nothing that scripts of another one would find there early."""
NEEDS = {"accelerate": "accelerate", "lightning": "lightning", "transformers": "transformers"}


@dataclass(frozen=True, kw_only=True)
class Script:
    """One script and what it promises."""

    name: str
    path: Path
    env: dict[str, str] = field(default_factory=dict, hash=False)
    elastic: str = "rounding"
    worlds: tuple[int, ...] = (1, 2, 3, 4)
    server: str = "base"
    refused: str = ""

    @property
    def lines(self) -> int:
        """How long it is; the smallest is the best to look at."""
        return len(self.path.read_text().splitlines())

    @property
    def can_be_left(self) -> bool:
        """True if it has a loop over `run.steps` that may be left by `break`."""
        text = self.path.read_text()
        return "in run.steps(" in text and "restore_best" not in text and not self.env


def _said(path: Path) -> dict[str, str]:
    found = re.search(r"^# property: (.*)$", path.read_text(), re.MULTILINE)
    return dict(word.split("=", 1) for word in found[1].split()) if found else {}


def _worlds(text: str) -> tuple[int, ...]:
    first, _, last = text.partition("-")
    return tuple(range(int(first), int(last or first) + 1))


def _made(name: str, path: Path, said: dict[str, str], env: dict[str, str]) -> Script:
    return Script(
        name=name,
        path=path,
        env=env,
        elastic=said.get("elastic", "rounding"),
        worlds=_worlds(said.get("worlds", "1-4")),
        server=said.get("server", "base"),
        refused=said.get("refused", ""),
    )


def _elsewhere() -> list[Script]:
    """Return jobs of other tests, which say by the environment which of their shapes they take."""
    jobs = TESTS / "runtime" / "jobs"
    shapes = ("steps", "framework", "epochs", "get_batch", "episodes", "tokens", "trainer")
    found = [_made(f"shapes/{s}", jobs / "shapes.py", {}, {"SHAPE": s}) for s in shapes]
    for algorithm in ("gan", "sam", "closure", "actor-critic"):
        for wrap in ("none", "ddp", "fsdp"):
            env = {"ALGORITHM": algorithm, "WRAP": wrap}
            said = {"server": "sharded"} if wrap == "fsdp" else {}
            found.append(_made(f"phases/{algorithm}-{wrap}", jobs / "phases.py", said, env))
    return found


@cache
def corpus() -> dict[str, Script]:
    """Return all scripts whose packages are installed, by name."""
    found = [
        _made(str(path.relative_to(CORPUS).with_suffix("")), path, _said(path), {})
        for path in sorted(CORPUS.rglob("*.py"))
        if path.name != "__init__.py"
    ]
    return {
        script.name: script
        for script in [*found, *_elsewhere()]
        if script.server not in NEEDS or importlib.util.find_spec(NEEDS[script.server])
    }
