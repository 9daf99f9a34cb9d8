from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from spotguard.errors import SpecError
from spotguard.spec.script import read_script

if TYPE_CHECKING:
    from pathlib import Path


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
    assert read_script(tmp_path / "job.py").path == tmp_path / "job.py"


@pytest.mark.parametrize(
    "line", ["", "import torch", "import spotguard", "# import spotguard.runtime"]
)
def test_a_script_without_spotguard_gets_the_fix(tmp_path: Path, line: str) -> None:
    """A script that could not survive is refused, with the lines that it needs."""
    (tmp_path / "job.py").write_text(line + "\n")
    with pytest.raises(
        SpecError, match=r"script: job\.py does not import spotguard\.runtime"
    ) as caught:
        read_script(tmp_path / "job.py")
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
    read_script(tmp_path / "job.py")


def test_a_broken_neighbour_is_not_this_commands_business(tmp_path: Path) -> None:
    """A module beside the script that is no Python is left for Python to report."""
    (tmp_path / "broken.py").write_text("def")
    (tmp_path / "job.py").write_text("import broken\nimport spotguard.runtime\n")
    read_script(tmp_path / "job.py")
    (tmp_path / "job.py").write_text("import broken\n")
    with pytest.raises(SpecError, match="does not import"):
        read_script(tmp_path / "job.py")


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
