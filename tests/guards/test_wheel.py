from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from spotguard.shared.version import __version__

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel as a release has it, but for the download of what builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    [built] = folder.glob("*.whl")
    return built


def test_wheel_carries_what_a_user_needs(wheel: Path) -> None:
    """The wheel holds every module, the task templates and py.typed, and nothing else of ours."""
    names = set(zipfile.ZipFile(wheel).namelist())

    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "spotguard").rglob("*.py")}
    assert modules <= names
    assert "spotguard/py.typed" in names
    templates = {f"spotguard/{p.relative_to(ROOT)}" for p in ROOT.glob("task_templates/*.yaml")}
    assert templates
    assert templates <= names
    strangers = {n for n in names if not n.startswith("spotguard") or "__pycache__" in n}
    assert not strangers


def test_what_the_package_says_of_itself_is_accepted(wheel: Path) -> None:
    """Its description can be shown, and nothing in its metadata is missing or wrong."""
    command = [sys.executable, "-m", "twine", "check", "--strict", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(wheel) as files:
        [metadata] = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        assert f"\nVersion: {__version__}\n" in files.read(metadata).decode()
