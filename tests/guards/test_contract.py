"""docs/architecture.md, and the pages to which its details moved, speak of what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
OVERVIEW = (DOCS / "architecture.md").read_text()
DETAILS = sorted({"architecture.md", *re.findall(r"\]\(([\w/-]+\.md)\)", OVERVIEW)})
ROOTS = (REPOSITORY, REPOSITORY / "spotguard", REPOSITORY / "spotguard" / "launch")
_FOLDER_OR_MODULE = re.compile(r"`((?:[a-z_0-9]+/)+(?:[a-z_0-9]+\.py)?)`")
_IN_THE_RUN_STORE = {
    "cache/listings/",
    "cache/pieces/",
    "frozen/",
    "attempts/",
    "checkpoints/",
    "clock/",
    "controller/",
    "joining/",
    "logs/",
    "metrics/",
    "places/",
    "profiles/",
    "wishes/",
}


@pytest.mark.parametrize("page", DETAILS)
def test_each_file_that_the_contract_names_exists(page: str) -> None:
    """A path in backticks is one of the package, or of the repository."""
    named = set(_FOLDER_OR_MODULE.findall((DOCS / page).read_text())) - _IN_THE_RUN_STORE
    missing = [name for name in named if not any((root / name).exists() for root in ROOTS)]
    assert not missing


def test_the_overview_names_files_and_pages() -> None:
    """The guard above has something to look at: a picture, and where its details are."""
    assert len(_FOLDER_OR_MODULE.findall(OVERVIEW)) > 20
    assert {
        f"inside/{page}.md" for page in ("stopping", "saving", "restoring", "controller")
    } <= set(DETAILS)


def test_the_overview_stays_one() -> None:
    """What a stranger reads first fits into some minutes: a short page, and at most 20 words."""
    glossary = OVERVIEW.split("## Words")[1].split("##")[0]
    words = re.findall(r"^\| ([a-z].*?) \|", glossary, re.MULTILINE)[1:]
    assert 10 < sum(len(word.split(", ")) for word in words) <= 20
    assert len(OVERVIEW.splitlines()) <= 140


def test_what_the_contract_says_of_infra_is_there() -> None:
    """One folder for each thing that it names."""
    line = next(line for line in OVERVIEW.splitlines() if line.startswith("| `infra/`"))
    said = (
        "the Slurm, EC2 and Kubernetes labs, controllers that you host yourself, warm images, "
        "least-privilege bucket policies, dashboards; `install.py`, by which `make` sets itself up"
    )
    assert line == f"| `infra/` | {said} |"
    folders = {path.name for path in (REPOSITORY / "infra").iterdir() if path.is_dir()}
    assert folders == {"lab", "ec2-lab", "k8s-lab", "controller", "warm-image", "iam", "dashboards"}
