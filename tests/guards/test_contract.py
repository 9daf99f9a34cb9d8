"""docs/architecture.md speaks of what exists."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CONTRACT = (REPOSITORY / "docs" / "architecture.md").read_text()


def test_each_file_that_the_contract_names_exists() -> None:
    """A path in backticks is one of the package, or of the repository."""
    named = re.findall(r"`([a-z_]+(?:/[a-z_0-9]+)*/(?:[a-z_0-9]+\.py)?)`", CONTRACT)
    named += re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]+\.py)`", CONTRACT)
    assert len(named) > 20
    roots = (REPOSITORY, REPOSITORY / "spotguard", REPOSITORY / "spotguard" / "launch")
    missing = [name for name in named if not any((root / name).exists() for root in roots)]
    assert not missing


def test_what_the_contract_says_of_infra_is_there() -> None:
    """One folder for each thing that it names, and no dashboards."""
    line = next(line for line in CONTRACT.splitlines() if line.startswith("| `infra/`"))
    assert line == "| `infra/` | the Slurm lab, least-privilege bucket policies |"
    folders = {path.name for path in (REPOSITORY / "infra").iterdir() if path.is_dir()}
    assert folders == {"lab", "iam"}
