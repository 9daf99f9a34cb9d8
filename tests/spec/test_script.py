from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from spotguard.errors import SpecError
from spotguard.spec.script import check_runtime, read_script
from spotguard.spec.sources import resolve

if TYPE_CHECKING:
    from pathlib import Path

RUNTIME = "import spotguard.runtime"


@pytest.mark.parametrize(
    "line",
    [
        "import spotguard.runtime",
        "import spotguard.runtime as spotguard",
        "from spotguard import runtime",
        "from spotguard.runtime import init",
        "def main():\n    import spotguard.runtime",
        "import importlib\nimportlib.import_module('spotguard.runtime')",
        'x = "\\d"\nimport spotguard.runtime',
    ],
)
def test_every_way_to_import_the_runtime_counts(tmp_path: Path, line: str) -> None:
    """A script that uses spotguard is recognised however it says so, without running it."""
    (tmp_path / "job.py").write_text(line + "\n")
    check_runtime(read_script(tmp_path / "job.py"))


@pytest.mark.parametrize(
    "line", ["", "import torch", "import spotguard", "# import spotguard.runtime"]
)
def test_a_script_without_spotguard_gets_the_fix(tmp_path: Path, line: str) -> None:
    """A script that could not survive is refused, with the lines that it needs."""
    (tmp_path / "job.py").write_text(line + "\n")
    with pytest.raises(
        SpecError, match=r"script: job\.py does not import spotguard\.runtime"
    ) as caught:
        check_runtime(read_script(tmp_path / "job.py"))
    assert "import spotguard.runtime as spotguard" in caught.value.hint
    assert "run = spotguard.init()" in caught.value.hint


@pytest.mark.parametrize(
    ("script", "module"),
    [
        ("import trainer", "trainer.py"),
        ("from lib.loop import train", "lib/loop.py"),
        ("from lib import loop", "lib/loop.py"),
        ("import lib", "lib/__init__.py"),
        ("from . import trainer", "trainer.py"),
    ],
)
def test_a_module_beside_the_script_may_import_it(tmp_path: Path, script: str, module: str) -> None:
    """The training loop may live in a module of the user's, one level away."""
    (tmp_path / module).parent.mkdir(exist_ok=True)
    (tmp_path / module).write_text("import spotguard.runtime\n")
    (tmp_path / "job.py").write_text(script + "\n")
    check_runtime(read_script(tmp_path / "job.py"))


@pytest.mark.parametrize(
    "files",
    [
        {"job.py": "import a", "a.py": "import b", "b.py": "import c", "c.py": RUNTIME},
        {"job.py": "from app.train import main", "app/train.py": "from .loop import run",
         "app/loop.py": "from ..core import x\nfrom . import inner", "app/inner.py": RUNTIME},
        {"job.py": "import app.cli", "app/__init__.py": "from .core.loop import run",
         "app/cli.py": "", "app/core/loop.py": "from ... import no\nfrom ..deep import y",
         "app/deep/__init__.py": "from lib.x import z", "lib/x.py": RUNTIME},
        {"job.py": "import importlib\nimportlib.import_module('a.b')", "a/b.py": "__import__('c')",
         "c.py": RUNTIME},
        {"job.py": "import a", "a.py": "import b\nimport job", "b.py": "import a\nimport c",
         "c.py": RUNTIME},
    ],
    ids=["three away", "relative", "through a package", "by a function", "in a circle"],
)  # fmt: skip
def test_imports_are_followed_through_local_files(tmp_path: Path, files: dict[str, str]) -> None:
    """However many files lie between the script and its training loop."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text + "\n")
    check_runtime(read_script(tmp_path / "job.py"))
    *_, last = files
    (tmp_path / last).write_text("import torch\n")
    with pytest.raises(SpecError, match="does not import") as caught:
        check_runtime(read_script(tmp_path / "job.py"))
    assert "--trust-script" in caught.value.hint


def test_a_thousand_local_files_are_read_in_a_moment(tmp_path: Path) -> None:
    """Each once, also where all import all, as the files of a large project nearly do."""
    names = [f"m{number}" for number in range(100)]
    for name in ["job", *names]:
        (tmp_path / f"{name}.py").write_text("".join(f"import {other}\n" for other in names))
    with pytest.raises(SpecError, match="does not import"):
        check_runtime(read_script(tmp_path / "job.py"))
    (tmp_path / "m99.py").write_text(RUNTIME)
    check_runtime(read_script(tmp_path / "job.py"))


def test_a_script_whose_import_cannot_be_seen_may_be_trusted(tmp_path: Path) -> None:
    """Its loop may be in an installed package: the user's word is taken then."""
    (tmp_path / "job.py").write_text("import our_company.training\n")
    with pytest.raises(SpecError, match="does not import"):
        resolve(tmp_path / "job.py", flags={}, environ={}, cwd=tmp_path)
    resolve(tmp_path / "job.py", flags={"trust_script": True}, environ={}, cwd=tmp_path)
    told = {"SPOTGUARD_TRUST_SCRIPT": "1"}
    resolve(tmp_path / "job.py", flags={}, environ=told, cwd=tmp_path)


def test_a_broken_neighbour_is_not_this_commands_business(tmp_path: Path) -> None:
    """A module beside the script that is no Python is left for Python to report."""
    (tmp_path / "broken.py").write_text("def")
    (tmp_path / "job.py").write_text("import broken\nimport spotguard.runtime\n")
    check_runtime(read_script(tmp_path / "job.py"))
    (tmp_path / "job.py").write_text("import broken\n")
    with pytest.raises(SpecError, match="does not import"):
        check_runtime(read_script(tmp_path / "job.py"))


def test_a_missing_script_gets_the_nearest(tmp_path: Path) -> None:
    """A mistyped file name is named, with the file that was meant."""
    (tmp_path / "train.py").write_text("")
    with pytest.raises(SpecError, match=r"there is no file .*trian\.py") as caught:
        read_script(tmp_path / "trian.py")
    assert caught.value.hint == "did you mean 'train.py'?"
    with pytest.raises(SpecError, match="there is no file"):
        read_script(tmp_path / "nowhere" / "train.py")


def test_what_is_no_python_file_is_refused(tmp_path: Path) -> None:
    """A folder, another kind of file, a file that cannot be read: one sentence each."""
    (tmp_path / "dir.py").mkdir()
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "loop.py").symlink_to("loop.py")
    for name, said in [
        ("dir.py", "is a folder"),
        ("notes.txt", "ending in .py"),
        ("loop.py", "there is no file"),
        ("x" * 5000 + ".py", "cannot be read: File name too long"),
    ]:
        with pytest.raises(SpecError, match=said):
            read_script(tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_script_without_permission_is_named(tmp_path: Path) -> None:
    """A file that may not be read is one sentence."""
    (tmp_path / "job.py").write_text("")
    (tmp_path / "job.py").chmod(0)
    with pytest.raises(SpecError, match="cannot be read"):
        read_script(tmp_path / "job.py")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"import spotguard.runtime\n\nif True\n", "syntax error in line 3"),
        (b"\xff\xfe\x00", "not text in its encoding"),
        (b"# coding: no-such-thing\n", "not text in its encoding"),
        (b"x = 1\0\n", "job.py"),
        (b"(" * 5000, "job.py"),
    ],
)
def test_what_python_would_refuse_is_refused_first(
    tmp_path: Path, content: bytes, said: str
) -> None:
    """A syntax error costs no launch: it is found at once, with its line."""
    (tmp_path / "job.py").write_bytes(content)
    with pytest.raises(SpecError) as caught:
        read_script(tmp_path / "job.py")
    assert said in str(caught.value)


def test_batch_sizes_are_read_where_they_are_plain(tmp_path: Path) -> None:
    """The plan can say the accumulation when the script states both sizes; else it is unknown."""
    job = tmp_path / "job.py"
    loader = "import spotguard.runtime as s\nl = s.init().loader(d, global_batch_size={}, {}={})\n"
    job.write_text(loader.format(512, "micro_batch_size", 8))
    assert read_script(job).batches == (512, 8)
    for unknown in [("n", "micro_batch_size", 8), (0, "micro_batch_size", 8), (512, "other", 8)]:
        job.write_text(loader.format(*unknown))
        assert read_script(job).batches is None
