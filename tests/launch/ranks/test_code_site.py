"""On nodes of this machine the run's code stays what it was, in the user's own folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

from spotguard.events import env
from spotguard.launch.ranks.worker_environment import look_after_workers, script_command

if TYPE_CHECKING:
    from pathlib import Path

_SCRIPT = """
import importlib.util, inspect, json, multiprocessing, pathlib, subprocess, sys
import pkg, gone, sub.deep
from pkg import inner

def here():
    return "old"

def child(queue):
    queue.put((here(), inner.WORD, __file__))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    spawned = queue.get()
    process.join()
    where = pathlib.Path(__file__).parent / "plug.py"
    spec = importlib.util.spec_from_file_location("plugin", where)
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    import made_later
    started = subprocess.run([sys.executable, "-c", "import pkg.inner as i; print(i.WORD)"],
                             capture_output=True, text=True).stdout.strip()
    pathlib.Path("out.txt").write_text("result")
    print(json.dumps({
        "words": [here(), pkg.WORD, inner.WORD, gone.WORD, sub.deep.WORD, plugin.WORD],
        "spawned": spawned, "file": __file__, "pkg": pkg.__file__, "path": list(pkg.__path__),
        "argv": sys.argv, "source": inspect.getsource(inner.word), "later": made_later.WORD,
        "data": (pathlib.Path(__file__).parent / "data.txt").read_text(), "started": started,
        "name": __name__, "leaked": "source" in globals(),
    }))
    inner.word(1 / 0)
"""
_FILES = {
    "train.py": _SCRIPT,
    "pkg/__init__.py": "WORD = 'old'",
    "pkg/inner.py": "WORD = 'old'\ndef word(*_):\n    return 'old'\n",
    "gone.py": "WORD = 'old'",
    "sub/deep.py": "WORD = 'old'",
    "plug.py": "WORD = 'old'",
}


def _write(top: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)


def test_code_is_the_copys_and_all_else_the_users(tmp_path: Path) -> None:
    """An edit, a `git checkout` and a file that goes change nothing of what the next launch runs.

    The script and its modules, those of workers that are spawned, of processes that it starts and
    of editable installs, and the source that `inspect` and tracebacks show, are the copy's. Paths,
    data and results are those of the folder; what is made later can be imported.
    """
    folder, copy = tmp_path / "project", tmp_path / "copy"
    _write(folder, _FILES)
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(folder)], check=True)
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
    _write(folder, {name: text.replace("old", "new") for name, text in _FILES.items()})
    _write(folder, {"data.txt": "data", "made_later.py": "WORD = 'later'"})
    (folder / "gone.py").unlink()
    shutil.rmtree(folder / "sub")
    given = {**os.environ, env.CODE: str(copy), env.CODE_OF: str(folder)}
    look_after_workers(given)
    script = str(folder / "train.py")
    for _ in range(2):  # the second time from what was compiled
        done = subprocess.run(
            [sys.executable, *script_command([script, "--lr", "1"], given)],
            cwd=folder,
            env=given,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout, done.stderr
        told = __import__("json").loads(done.stdout)
        assert told["words"] == ["old"] * 6
        assert told["spawned"] == ["old", "old", script]
        assert told["started"] == "old"
        assert told["source"] == "def word(*_):\n    return 'old'\n"
        assert (told["file"], told["argv"]) == (script, [script, "--lr", "1"])
        assert (told["pkg"], told["path"]) == (
            str(folder / "pkg/__init__.py"),
            [str(folder / "pkg")],
        )
        assert (told["data"], told["later"], told["name"]) == ("data", "later", "__main__")
        assert told["leaked"] is False
        first = textwrap.dedent(done.stderr).splitlines()
        assert first[0].startswith("Traceback")
        assert f'File "{script}"' in first[1]
        assert "ZeroDivisionError" in first[-1]
    assert (folder / "out.txt").read_text() == "result"
    assert not list(copy.rglob("out.txt"))


def test_without_a_copy_nothing_is_between_python_and_the_script(tmp_path: Path) -> None:
    """Nodes elsewhere, and runs of earlier versions, start the script as they always did."""
    script = str(tmp_path / "train.py")
    assert script_command([script, "a"], {}) == [script, "a"]
    elsewhere = {env.CODE: str(tmp_path / "copy"), env.CODE_OF: str(tmp_path / "project")}
    assert script_command([script], elsewhere) == [script]
