"""Opening a store by what the user wrote."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from spotguard.errors import UsageError
from spotguard.storage import PrefixedStore, open_store
from spotguard.storage.urls import below, split_last
from spotguard.testing.stores import MemoryStore

if TYPE_CHECKING:
    from pathlib import Path


def test_paths_and_file_urls_open_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path, an absolute one, `~`, and the store's own URL lead to the same objects."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    odd = "ru ns#1%?é"
    open_store(odd).put("x", b"1")
    url = open_store(tmp_path / odd).url

    for given in (
        f"./{odd}",
        str(tmp_path / odd),
        f"~/{odd}",
        url,
        url.replace("///", "//localhost/"),
    ):
        assert open_store(given).get("x") == b"1"
        assert open_store(given).url == url
    assert url.startswith("file:///")


@pytest.mark.parametrize(
    ("url", "run"),
    [
        ("s3://bucket/some/prefix?endpoint=http://127.0.0.1:9&region=x", "run-1"),
        ("s3://bucket", "run-1"),
        ("gs://bucket/p", "r"),
        ("/folder/with?mark", "r"),
    ],
)
def test_a_run_stands_below_its_store_whatever_options_the_url_has(url: str, run: str) -> None:
    """The options stay at the end, and the way back leads to the same store."""
    if "://" in url:
        assert split_last(below(url, run)) == (url, run)
        assert below(url, run).partition("?")[0].endswith(f"/{run}")
    else:
        assert split_last(f"{url}/{run}") == (url, run)


@pytest.mark.parametrize(
    ("given", "hint"),
    [("fiel:///x", "file://"), ("gcs://b", "gs://"), ("s33://b", "s3://"), ("ftp://x", "path")],
)
def test_unknown_schemes_get_the_nearest(given: str, hint: str) -> None:
    """A typo in the scheme is told from a path, and the nearest one is offered."""
    with pytest.raises(UsageError, match="unknown scheme") as caught:
        open_store(given)
    assert hint in caught.value.hint


def test_a_file_url_of_another_host_is_refused() -> None:
    """Two slashes instead of three make a host of the first folder: the hint says so."""
    with pytest.raises(UsageError, match="host 'tmp'") as caught:
        open_store("file://tmp/runs")
    assert "file:///tmp/runs" in caught.value.hint


@pytest.mark.parametrize(
    "given",
    ["gs://[b/p", "az://[c@a/p", "file://[x/y", "s3://b/p?endpoint=http://[::1"],
)
def test_a_bracket_without_the_other_is_no_url(given: str) -> None:
    """Such a URL is named, whatever it is that Python makes of it."""
    with pytest.raises(UsageError) as caught:
        open_store(given)
    assert given.partition("?")[0] in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_a_url_that_is_none_tells_no_password(scheme: str) -> None:
    """Should somebody have written one into it."""
    with pytest.raises(UsageError) as caught:
        open_store(f"{scheme}://[me:hunter2@a/p?sig=hunter2")
    assert "hunter2" not in f"{caught.value}{caught.value.hint}"


@pytest.mark.parametrize("given", ["", "  ", "file://", "a\0b"])
def test_nothing_is_not_a_folder(given: str) -> None:
    """An empty or impossible path is refused before anything is made."""
    with pytest.raises(UsageError):
        open_store(given)


def test_a_prefixed_store_is_the_store_of_its_url(tmp_path: Path) -> None:
    """`open_store(prefixed.url)` sees the same objects, and nothing outside is visible."""
    whole = open_store(tmp_path)
    whole.put("other/x", b"")
    run = PrefixedStore(whole, "runs/a/")
    run.put("deep/x", b"1")

    assert open_store(run.url).get("deep/x") == b"1"
    assert [info.key for info in run.list()] == ["deep/x"]
    assert run.list_folders("") == ["deep/"]
    assert PrefixedStore(MemoryStore(), "a").url.endswith("/a")


@pytest.mark.parametrize("prefix", ["", "/", "../x", "a//b", "a/../b"])
def test_a_prefix_must_be_a_folder_inside(prefix: str) -> None:
    """No prefix leads out of the store, or to all of it by accident."""
    with pytest.raises(UsageError):
        PrefixedStore(MemoryStore(), prefix)


def test_storage_and_checkpoint_are_light_to_import() -> None:
    """The job imports both: neither may pull in torch, numpy, or anything of the controller."""
    code = (
        "import sys, spotguard.storage, spotguard.checkpoint.lineage, "
        "spotguard.checkpoint.retention\n"
        "heavy = {'torch', 'numpy', 'typer', 'pydantic', 'boto3', 'sky', 'rich', 'requests'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_the_home_of_nobody_is_an_ordinary_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is for a shell; a traceback tells nobody what is wrong."""
    monkeypatch.chdir(tmp_path)
    assert open_store("~nobody-here/x").url == f"file://{tmp_path}/~nobody-here/x"
