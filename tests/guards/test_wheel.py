from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_wheel_carries_what_a_user_needs(tmp_path: Path) -> None:
    """The wheel holds every module, the task templates and py.typed, and nothing else of ours."""
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())

    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "spotguard").rglob("*.py")}
    assert modules <= names
    assert "spotguard/py.typed" in names
    templates = {f"spotguard/{p.relative_to(ROOT)}" for p in ROOT.glob("task_templates/*.yaml")}
    assert templates
    assert templates <= names
    strangers = {n for n in names if not n.startswith("spotguard") or "__pycache__" in n}
    assert not strangers
