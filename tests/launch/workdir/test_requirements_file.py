"""Requirements are read as pip reads them, so what is said of them is true."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spotguard.errors import SpecError
from spotguard.launch.workdir.requirements_file import check_no_login, plain_requirements
from spotguard.spec.setting_layers import script_needs

if TYPE_CHECKING:
    from pathlib import Path

_FILE = """\
# tools
--extra-index-url https://pypi.example.org/simple
-i https://pypi.example.org/other
--find-links ./wheels
-r more/base.txt
-c limits.txt
numpy>=1.26 ; python_version >= "3.8"  # a comment
einops==0.8.0 \\
    --hash=sha256:aaaa \\
    --hash=sha256:bbbb
-e ./libs/b
./libs/c[extra]
--editable=git+https://github.com/a/b.git@v1#egg=b-package
timm @ https://example.org/timm-1.0-py3-none-any.whl ; sys_platform == "linux"
https://example.org/x-1.0-py3-none-any.whl
rich
"""


def test_a_file_is_read_as_pip_reads_it(tmp_path: Path) -> None:
    """Options, other files, continued lines, hashes, markers, paths and addresses are known."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more/base.txt").write_text("xxhash\n-r deeper.txt\n-r base.txt\n")
    (tmp_path / "more/deeper.txt").write_bytes(b"\xef\xbb\xbfpsutil\n")
    (tmp_path / "limits.txt").write_text("absent<2\n")
    file = tmp_path / "requirements.txt"
    file.write_text(_FILE)
    found = plain_requirements(file)
    assert found.lines == (
        *("xxhash", "psutil", 'numpy>=1.26 ; python_version >= "3.8"', "einops==0.8.0"),
        *("b-package", 'timm ; sys_platform == "linux"', "rich"),
    )
    assert found.folders == ("./libs/b", "./libs/c")
    names = [path.name for path in found.files]
    assert names == ["requirements.txt", "base.txt", "deeper.txt", "limits.txt"]
    assert found.has_hashes


@pytest.mark.parametrize(
    ("line", "is_refused"),
    [
        ("--extra-index-url https://me:secret@pypi.example.org/simple", True),
        ("x @ git+https://ghp_abcdef@github.com/a/x.git", True),
        ("-e git+https://oauth2:abc@gitlab.com/a/x.git#egg=x", True),
        ("--extra-index-url https://${USER_NAME}:${TOKEN}@pypi.example.org/simple", False),
        ("x @ git+ssh://git@github.com/a/x.git", False),
        ("x @ https://example.org/x.whl", False),
    ],
)
def test_a_login_in_a_file_is_refused_without_its_words(
    tmp_path: Path, line: str, is_refused: bool
) -> None:
    """No secret gets into a task; the line is named, the variable is the way out."""
    (tmp_path / "r.txt").write_text("-r inner.txt\n")
    (tmp_path / "inner.txt").write_text(f"rich\n{line}\n")
    if not is_refused:
        check_no_login("node.requirements", tmp_path / "r.txt")
        return
    with pytest.raises(SpecError, match=r"inner\.txt line 2") as refused:
        check_no_login("node.requirements", tmp_path / "r.txt")
    assert not any(word in str(refused.value) for word in ("secret", "ghp_", "abc@"))


def _block(*lines: str) -> str:
    text = "\n".join(f"# {line}" for line in lines)
    return f"# /// script\n{text}\n# ///\nimport spotguard.runtime\n"


def test_sources_of_a_block_are_honoured_where_pip_has_words_for_them(tmp_path: Path) -> None:
    """What a block takes from a repository, an address or a folder is not taken from PyPI."""
    needs = script_needs(
        tmp_path / "train.py",
        _block(
            'dependencies = ["a[x]>=1", "b", "My_C; python_version > \'3\'", "rich>=13"]',
            "[tool.uv.sources]",
            'a = {git = "https://github.com/u/a", rev = "v1"}',
            'b = {path = "libs/b", editable = true}',
            'my-c = {url = "https://example.org/c.whl"}',
            "[[tool.uv.index]]",
            'url = "https://pypi.example.org/simple"',
            "default = true",
        ),
    )
    assert needs.dependencies == (
        "a[x] @ git+https://github.com/u/a@v1",
        "My_C @ https://example.org/c.whl ; python_version > '3'",
        "rich>=13",
    )
    assert needs.folders == ("-e ./libs/b",)
    assert needs.index == "https://pypi.example.org/simple"


@pytest.mark.parametrize(
    "lines",
    [
        ('[tool.uv.sources]\ntorch = {index = "cu126"}'),
        ("[tool.uv.sources]\ntorch = {workspace = true}"),
        ('[tool.uv.sources]\ntorch = [{index = "a", marker = "sys_platform == \'linux\'"}]'),
        ('[[tool.uv.index]]\nname = "cu126"\nurl = "https://x.org"\nexplicit = true'),
        ('[[tool.uv.index]]\nname = "mine"\nurl = "https://x.org"'),
    ],
)
def test_sources_that_pip_cannot_keep_apart_are_refused(tmp_path: Path, lines: str) -> None:
    """Nodes never ask PyPI for a name that is somebody's own."""
    with pytest.raises(SpecError, match="from PyPI") as refused:
        script_needs(tmp_path / "train.py", _block('dependencies = ["torch"]', *lines.split("\n")))
    assert "requirements file" in refused.value.hint
