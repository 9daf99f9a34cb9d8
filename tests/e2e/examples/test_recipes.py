"""The recipes run as they are, and say what they promise."""

from __future__ import annotations

import ast
import importlib.util
import sys
from typing import TYPE_CHECKING

import pytest

from tests.e2e.lab.lab_jobs import EXAMPLES, Lab, checkpoints

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

RECIPES = EXAMPLES / "recipes"
SAYS = {
    "adamw_8bit.py": "moments of 274 kB instead of 1053 kB",
    "curriculum.py": "error 0.",
    "dedup.py": "texts are trained on",
    "distillation.py": "with 1210 parameters instead of 76810",
    "early_stopping.py": "of 2000 steps; best after",
    "hyperparameters.py": "lr 0.003, width 64: loss 0.",
    "lora.py": "8192 of 533504 parameters are trained",
    "mixed_precision.py": "MB kept for backward",
    "offline_augmentation.py": "images: augmented in",
    "pruning_int8.py": "kB in int8 instead of",
    "token_cache.py": "blocks made in",
    "webdataset_shards.py": "from 8 tar shards",
}
NEEDS = {
    "adamw_8bit.py": "torchao",
    "dedup.py": "datasketch",
    "lora.py": "peft",
    "pruning_int8.py": "torchao",
    "token_cache.py": "datasets",
    "webdataset_shards.py": "webdataset",
}
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "mixed_precision.py": ("--bf16", "--checkpointing", "--steps", "4")
}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.py")), ids=lambda p: p.name)
def test_a_recipe_is_short_and_does_what_it_says(path: Path, tmp_path: Path) -> None:
    """At most 120 lines that say how they are run; where its library is missing, it is skipped."""
    text = path.read_text()
    assert len(text.splitlines()) <= 120
    told = ast.get_docstring(ast.parse(text)) or ""
    assert f"python examples/recipes/{path.name}" in told
    needed = NEEDS.get(path.name)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    lab = Lab(tmp_path)
    said = lab.run(
        sys.executable, path, *ARGUMENTS.get(path.name, ()), env={"SPOTGUARD_RUN_ID": "r"}
    )
    assert said.code == 0, said.err
    assert SAYS[path.name] in said.out
    assert checkpoints(lab.work / "spotguard-runs" / "r")


def test_a_stopped_recipe_keeps_only_what_it_needs(tmp_path: Path) -> None:
    """The base of the distilled teacher is there once, and beside it the student's saves."""
    lab = Lab(tmp_path)
    said = lab.run(sys.executable, RECIPES / "distillation.py", env={"SPOTGUARD_RUN_ID": "r"})
    assert said.code == 0, said.err
    run = lab.work / "spotguard-runs" / "r"
    [base] = run.glob("frozen/*/*.safetensors")
    own = [path.stat().st_size for path in run.glob("checkpoints/*/*.safetensors")]
    assert max(own) < base.stat().st_size / 10


def test_precision_compiles_too(tmp_path: Path) -> None:
    """All three levers at once; the time of a step is told."""
    lab = Lab(tmp_path)
    levers = ("--bf16", "--checkpointing", "--compile", "aot_eager")
    size = ("--width", "16", "--steps", "4")
    said = lab.run(
        sys.executable,
        RECIPES / "mixed_precision.py",
        *levers,
        *size,
        env={"SPOTGUARD_RUN_ID": "r"},
    )
    assert said.code == 0, said.err
    assert "ms a step" in said.out
