"""`node.file_mounts` and `node.volumes`: how they are written, and what they must not hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from spotguard.errors import SpecError
from spotguard.spec.infra import mounts, volume_names

if TYPE_CHECKING:
    from pathlib import Path

    from tests.spec.conftest import Resolve


def test_tables_lists_and_one_text_mean_the_same() -> None:
    """A file has a table, the command line a list."""
    table = {"/b": "gs://x/y", "/a": "s3://x"}
    assert mounts(table) == mounts(["/b=gs://x/y", "/a=s3://x"]) == {"/a": "s3://x", **table}
    assert list(mounts(table)) == ["/a", "/b"]
    assert volume_names("/mnt/data=my-volume") == {"/mnt/data": "my-volume"}


def test_what_is_here_is_meant_as_seen_from_where_it_is_written(
    resolve_job: Resolve, tmp_path: Path
) -> None:
    """A relative path in a flag: from here; buckets stay as they are."""
    spec = resolve_job({"node.file_mounts": ["/a=./words", "/b=s3://b/c=d"]}).spec
    assert spec.node.file_mounts["/b"] == "s3://b/c=d"
    assert spec.node.file_mounts["/a"].startswith("/")
    assert spec.node.file_mounts["/a"].endswith("/words")


@pytest.mark.parametrize(
    "raw",
    [
        "data",
        "data=s3://b",
        "/data=",
        "=s3://b",
        "/data=relative",
        "/a b=s3://b",
        "/$(touch x)=s3://b",
        "/a;b=s3://b",
        "/a/../../etc=s3://b",
        "/data=s3://key:secret@bucket/x",
        "/data=s3://b/$(touch x)",
        "/data=https://evil.example/x?token=1",
        "/data=https://a.blob.core.windows.net/c?sv=1&sig=secret",
        "/data=/tmp/`touch x`",
        "/data=/tmp/a'b",
        ["/a=s3://b", "/a=s3://c"],
        {"/a": 1},
        {"/a": ["s3://b"]},
        7,
        True,
    ],
    ids=repr,
)
def test_what_a_shell_could_read_otherwise_is_refused(resolve_job: Resolve, raw: object) -> None:
    """Nor logins in addresses: the task is shown, and kept."""
    with pytest.raises(SpecError) as problem:
        resolve_job({"node.file_mounts": raw})
    assert problem.value.message.startswith("node.file_mounts: given ")
    assert "allowed: places on a node" in problem.value.message


@pytest.mark.parametrize("raw", ["/data=My Volume", "/data=a/b", "rel=v", "/data=v$", "/data=-v"])
def test_a_volume_is_a_name(resolve_job: Resolve, raw: str) -> None:
    """As SkyPilot has them."""
    with pytest.raises(SpecError, match=r"^node\.volumes: given "):
        resolve_job({"node.volumes": raw})
