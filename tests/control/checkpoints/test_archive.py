"""`checkpoints archive`: what is old goes to the coldest class, and what a run needs never does."""

from __future__ import annotations

import io
import json
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import pytest
from rich.console import Console

from spotguard.checkpoint.lineage import CheckpointRef, latest_valid
from spotguard.checkpoint.manifest import load_manifest
from spotguard.checkpoint.reading import ShardReader
from spotguard.cli.main import main
from spotguard.cli.views.checkpoints import checkpoints_screen
from spotguard.control.checkpoints import commands as checkpoints
from spotguard.control.checkpoints.archive import archive, plan_archive
from spotguard.control.checkpoints.commands import Validity
from spotguard.control.checkpoints.find import OpenedRun
from spotguard.errors import ArchivedCheckpoint, StoreError, UsageError
from spotguard.events import keys
from spotguard.events.states import CheckpointKind
from spotguard.storage import FileStore, PrefixedStore, open_store
from spotguard.storage.remote.store import RemoteStore
from spotguard.testing import FakeClock, FaultyStore, MemoryStore
from spotguard.testing.bucket import MemoryBucket
from tests.checkpoint.crashes.savings import claim, flip, save
from tests.storage.harness.servers import CannotRun, moto_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rich.console import RenderableType

    from spotguard.storage.base import ObjectInfo, ObjectStore
    from tests.storage.harness.servers import Server

DAY_S = 86_400.0
NOW = 1_700_000_000.0


Store = TypeVar("Store", bound="ObjectStore")


def a_run(store: Store) -> Store:
    """Save one checkpoint every 30 days until today: 10, 20, ... 70; 20 is pinned, 30 a best."""
    claim(store, 1)
    for number in range(1, 8):
        kind = CheckpointKind.BEST if number == 3 else CheckpointKind.PERIODIC
        save(store, 10 * number, kind=kind, created_at=NOW - (7 - number) * 30 * DAY_S)
    checkpoints.pin(store, ref(20))
    return store


def ref(step: int) -> CheckpointRef:
    """Return a checkpoint of attempt 1."""
    found = CheckpointRef.of(keys.checkpoint(step, 1))
    assert found
    return found


def opened(store: ObjectStore, *, at_rest: bool | None = True) -> OpenedRun:
    """Return the run of a store."""
    return OpenedRun(run_id="a-run", store=store, at_rest=at_rest)


def steps(store: ObjectStore, days: float) -> list[int]:
    """Return which steps would be archived."""
    planned = plan_archive(opened(store), older_than_s=days * DAY_S, clock=FakeClock(NOW))
    return [item.step for item in planned]


def archive_all(store: ObjectStore, days: float) -> list[int]:
    """Archive what is older; return the steps."""
    planned = plan_archive(opened(store), older_than_s=days * DAY_S, clock=FakeClock(NOW))
    return [item.step for item in archive(store, planned)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """S3 by moto."""
    try:
        with moto_server() as running:
            yield running
    except CannotRun as why:
        pytest.skip(str(why))


@pytest.fixture(params=["memory", "remote", "s3"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Return a run on each kind of store that has an archive."""
    if request.param == "memory":
        return a_run(MemoryStore())
    if request.param == "remote":
        return a_run(RemoteStore(MemoryBucket()))
    boto3 = pytest.importorskip("boto3")
    for name, value in request.getfixturevalue("server").env.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    return a_run(open_store(f"s3://bucket/{uuid.uuid4().hex}"))


def test_what_is_old_is_archived_and_listed_as_such(store: ObjectStore) -> None:
    """Shards move, manifests stay readable, and the list says which are where."""
    assert archive_all(store, 45) == [10, 40, 50]
    rows = {row.step: row for row in checkpoints.list_checkpoints(opened(store))}
    frozen = [step for step, row in rows.items() if row.condition is Validity.ARCHIVED]
    assert sorted(frozen) == [10, 40, 50]
    assert rows[50].size_bytes == rows[70].size_bytes
    assert {row.step for row in rows.values() if row.is_next} == {70}
    assert steps(store, 45) == []


@pytest.mark.parametrize("days", [0.0, 29.0, 1000.0])
def test_pinned_best_and_the_last_two_are_never_archived(days: float) -> None:
    """Whatever age is asked for: a run can always go on, and what was chosen stays at hand."""
    store = a_run(MemoryStore())
    expected = {0.0: [10, 40, 50], 29.0: [10, 40, 50], 1000.0: []}
    assert steps(store, days) == expected[days]


def test_the_last_two_are_the_last_two_whole_ones() -> None:
    """A damaged checkpoint is nothing to fall back on, so it does not count."""
    store = a_run(MemoryStore())
    flip(store, keys.manifest(keys.checkpoint(60, 1)), 400)
    assert steps(store, 0) == [10, 40]


def test_a_final_one_is_never_archived() -> None:
    """What a run was for stays at hand, also when a later run of it went on."""
    store = MemoryStore()
    claim(store, 1)
    for step in (10, 20, 30, 40):
        kind = CheckpointKind.FINAL if step == 10 else CheckpointKind.PERIODIC
        save(store, step, kind=kind, created_at=0.0)
    assert steps(store, 0) == [20]


def test_a_restore_passes_over_what_is_archived_and_says_so(store: ObjectStore) -> None:
    """It is not called damaged, and the one before or after it is used."""
    for shard in list(store.list(keys.checkpoint(70, 1))):
        if shard.key.endswith(".safetensors"):
            store.archive(shard.key)
    found, skipped = latest_valid(store)
    assert found is not None
    assert found.step == 60
    assert [prefix for prefix, _ in skipped] == [keys.checkpoint(70, 1)]
    assert "is archived; bringing it back takes hours" in skipped[0][1]


def test_verification_does_not_call_an_archived_one_damaged() -> None:
    """Nothing of it is read, for nothing can be."""
    store = a_run(MemoryStore())
    archive_all(store, 100)
    (found,) = checkpoints.verify(opened(store), [ref(10)])
    assert found.condition is Validity.ARCHIVED
    assert found.problems == ()


def test_an_archive_that_broke_off_goes_on_where_it_was() -> None:
    """One shard moved of two: it counts as archived, and the next call moves the other."""
    inner = a_run(MemoryStore())
    store = FaultyStore(inner).fail("archive", nth=3, error=StoreError("scripted"))
    with pytest.raises(StoreError, match="scripted"):
        archive_all(store, 100)  # the first call only asks whether there is an archive
    assert len(inner.archived) == 1
    (planned,) = plan_archive(opened(inner), older_than_s=100 * DAY_S, clock=FakeClock(NOW))
    assert (planned.step, len(planned.shards)) == (10, 1)
    assert archive(inner, [planned]) == [planned]
    assert len(inner.archived) == 2


def test_half_an_archived_checkpoint_is_archived() -> None:
    """Whichever shard it is that cannot be read."""
    store = a_run(MemoryStore())
    shard = [info.key for info in store.list(keys.checkpoint(10, 1)) if "-00001-" not in info.key]
    store.archive(next(key for key in shard if key.endswith(".safetensors")))
    rows = {row.step: row.condition for row in checkpoints.list_checkpoints(opened(store))}
    assert rows[10] is Validity.ARCHIVED


def test_what_is_pinned_or_pruned_meanwhile_is_left_alone() -> None:
    """Between the plan and the move somebody may have said yes for a minute."""
    store = a_run(MemoryStore())
    planned = plan_archive(opened(store), older_than_s=45 * DAY_S, clock=FakeClock(NOW))
    checkpoints.pin(store, ref(10))
    for info in list(store.list(keys.checkpoint(40, 1))):
        store.delete(info.key)
    assert [item.step for item in archive(store, planned)] == [50]


def test_a_run_that_goes_on_is_refused() -> None:
    """Its job may be reading or deleting at this moment."""
    store = a_run(MemoryStore())
    with pytest.raises(UsageError, match="not known to be at rest"):
        plan_archive(opened(store, at_rest=None), older_than_s=0)


def test_a_folder_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Before anything is looked at, also if nothing is old enough."""
    with pytest.raises(UsageError, match="has no archive") as caught:
        plan_archive(opened(FileStore(tmp_path)), older_than_s=0)
    assert "copy the run to a bucket" in caught.value.hint


def test_a_lost_answer_is_no_failure() -> None:
    """The repeated request finds the object archived, which is what was wanted."""
    bucket = MemoryBucket()
    store = a_run(RemoteStore(bucket, clock=FakeClock()))
    bucket.lose_answer("archive", nth=2)
    assert archive_all(store, 100) == [10]


def test_s3_archives_what_is_archived_no_second_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 would refuse to copy it; nothing is asked, so a lost answer costs nothing."""
    boto3 = pytest.importorskip("boto3")
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    store = open_store(f"s3://bucket/{uuid.uuid4().hex}")
    store.put("x", b"1")
    store.archive("x")
    store.archive("x")
    found = store.head("x")
    assert found is not None
    assert (found.archived, found.readable) == (True, False)
    assert [info.archived for info in store.list()] == [True]
    with pytest.raises(StoreError, match="is archived"):
        store.get("x")


def test_a_shard_in_the_archive_is_told_from_a_damaged_one() -> None:
    """Who reads it gets a class of its own."""
    store = a_run(MemoryStore())
    archive_all(store, 100)
    manifest = load_manifest(store, keys.checkpoint(10, 1))
    with pytest.raises(ArchivedCheckpoint):
        ShardReader(store, manifest.prefix, manifest.shards[0]).check_size()


class ReadAtOnce(MemoryStore):
    """A store whose archive can be read at once, as that of Google Cloud Storage."""

    def _info(self, key: str) -> ObjectInfo:
        return replace(super()._info(key), readable=True)


def test_where_the_archive_is_read_at_once_a_checkpoint_stays_whole() -> None:
    """It is shown as archived all the same, moved once, and a resume may use it."""
    store = a_run(ReadAtOnce())
    assert archive_all(store, 100) == [10]
    row = checkpoints.list_checkpoints(opened(store))[-1]
    assert (row.step, row.condition, row.archived) == (10, Validity.WHOLE, True)
    assert "whole, archived" in shown(checkpoints_screen([row]))
    assert archive_all(store, 100) == []


def shown(screen: RenderableType) -> str:
    """Return what is printed."""
    text = io.StringIO()
    Console(file=text, width=100).print(screen)
    return text.getvalue()


# ---------------------------------------------------------------- the command


@pytest.fixture
def place(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return STORE/RUN_ID of a run on S3 whose last attempt is known to be over."""
    boto3 = pytest.importorskip("boto3")
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path))
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="bucket")
    root = f"s3://bucket/{uuid.uuid4().hex}"
    store = a_run(PrefixedStore(open_store(root), "a-run"))
    store.put(keys.end(1), b"{}")
    return f"{root}/a-run"


@pytest.mark.slow
def test_the_command_shows_asks_and_moves(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run changes nothing, without a terminal `--yes` is wanted, and `ls` shows the rest."""
    command = ["checkpoints", "archive", place, "--older-than", "90d"]
    assert main([*command, "--dry-run"]) == 0
    dry = capsys.readouterr().out
    assert "10-1" in dry
    assert "would be archived" in dry
    assert "nothing was" in dry
    assert main(command) == 2
    assert "--yes" in capsys.readouterr().err
    assert main(["checkpoints", "archive", place, "--older-than", "90d", "--yes", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["archived"] is True
    assert [item["step"] for item in body["checkpoints"]] == [10, 40, 50]
    assert main(["checkpoints", "ls", place]) == 0
    listed = {line.split()[0]: line.split()[-1] for line in capsys.readouterr().out.splitlines()}
    assert (listed["10-1"], listed["70-1"]) == ("archived", "whole")
    assert main([*command, "--yes"]) == 0
    assert capsys.readouterr().out == "nothing to archive\n"
    assert main(["checkpoints", "verify", place, "--all"]) == 0


def test_an_age_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the option and an example."""
    assert main(["checkpoints", "archive", "/nowhere/job-1", "--older-than", "old"]) == 2
    said = capsys.readouterr().err
    assert "--older-than: 'old' is no length of time" in said
