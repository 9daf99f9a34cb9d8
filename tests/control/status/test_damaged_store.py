"""One damaged object in a store hides no run: not the others, and not its own."""

from __future__ import annotations

import contextlib
import json
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.checkpoint.lineage import Claim
from spotguard.cli.main import main
from spotguard.control import api
from spotguard.control.report import mirror as mirroring
from spotguard.control.report.fleet import Fleet
from spotguard.control.report.mirror import Mirror
from spotguard.control.report.stored import list_stored
from spotguard.errors import SpotguardError, UsageError
from spotguard.events import keys
from spotguard.events.checksummed import with_checksum
from spotguard.pages.html import as_json
from spotguard.pages.run_page import run_page
from spotguard.pages.runs_page import runs_page
from spotguard.shared.units import to_iso
from spotguard.storage import PrefixedStore, open_store
from tests.control.status.test_stored_runs import a_run, happened, told
from tests.pages.hostile_journals import HOSTILE

if TYPE_CHECKING:
    from pathlib import Path

RUNS = ("job-1", "job-2", "job-3")
DAMAGES = (b"", b"\xff\xfe", b"{", b"[]", b"{}", b"null", b'"words"', b"[" * 5000, b"{" * 5000)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each look is a look, into a home of its own."""
    monkeypatch.setattr(mirroring, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    api._stored_runs.clear()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store of three runs, each with two attempts and all that one leaves."""
    root = tmp_path / "team"
    for name in RUNS:
        a_run(root, name, told(name), age_s=1e5)  # its controller is dead: all else is read
        store = PrefixedStore(open_store(str(root)), name)
        claim = Claim(attempt=1, claimed_at=time.time() - 45, resumed_from=None, writer="w")
        store.put(keys.claim(1), claim.to_json())
        happened(store, "ended", 5, {"reason": "preempted", "step": 9, "saved_step": 9})
        end = {"reason": "preempted", "gone_at": time.time() - 30, "last_step": 9}
        store.put(keys.end(1), json.dumps(end).encode())
        launch = {"nodes": 2, "infra": "aws", "intended_at": time.time() - 25, "after": 1}
        lost = {"at": time.time() - 28, "paid_s": 3.0, "usd": 0.5}
        store.put(keys.launch(2), json.dumps({**launch, "lost_launches": [lost]}).encode())
        store.put(keys.go(2), json.dumps({"at": time.time() - 24}).encode())
        beat = {"node": 0, "at": to_iso(time.time() - 3), "step": 12, "attempt": 2}
        store.put(f"{keys.heartbeats(2)}00000.json", json.dumps(beat).encode())
        store.put(f"{keys.logs(2)}00000-1700000000000-000000-0001.jsonl.gz", b"\x1f\x8b")
    return root


def looked_at(root: Path) -> dict[str, str | None]:
    """Return each run's problem by all ways of looking; only expected errors may come of any."""
    listed, unreadable = list_stored(str(root))
    by_list: dict[str, str | None] = {run.run_id: run.problem for run in listed}
    by_list |= {each.store.rsplit("/", 1)[1]: each.problem for each in unreadable}
    assert sorted(by_list) == sorted(RUNS)
    fleet = Fleet([Mirror(str(root))])
    fleet.refresh()
    summaries = {run.run_id: run.problem for run in fleet.summaries()}
    assert sorted(summaries) == sorted(RUNS)
    as_json(runs_page(fleet.summaries()))
    fleet.measures()
    for name in RUNS:
        with contextlib.suppress(SpotguardError):
            as_json(run_page(fleet.follower(name).look(), live=True))
    return summaries


def test_a_damaged_claim_is_a_warning(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was restored from is unknown; how the run stands and what it cost is told."""
    (root / "job-2" / keys.claim(1)).write_bytes(b"{")
    assert looked_at(root) == dict.fromkeys(RUNS)
    assert main(["status", str(root / "job-2")]) == 0
    assert f"{keys.claim(1)} was passed over" in capsys.readouterr().out.replace("\n", " ")
    assert main(["runs", str(root)]) == 0
    assert all(name in capsys.readouterr().out for name in RUNS[:1])


def test_what_cannot_be_read_is_in_the_list_with_its_reason(root: Path) -> None:
    """On the dashboard, too: also its page says why; once it can be read, all is told."""
    path = root / "job-2" / keys.RUN
    whole = path.read_bytes()
    path.write_bytes(b"{")
    fleet = Fleet([Mirror(str(root))])
    fleet.refresh()
    problems = {run.run_id: run.problem for run in fleet.summaries()}
    assert (problems.pop("job-2") or "").startswith("The run at ")
    assert problems == {"job-1": None, "job-3": None}
    assert "makes no sense" in as_json(runs_page(fleet.summaries()))
    with pytest.raises(UsageError, match="makes no sense"):
        fleet.follower("job-2")
    path.write_bytes(whole)
    assert fleet.refresh()
    assert [run.problem for run in fleet.summaries()] == [None, None, None]
    fleet.follower("job-2").look()
    path.write_bytes(b"[]")
    (root / "job-2" / keys.end(2)).write_bytes(b"{}")
    assert fleet.refresh()
    [damaged] = [run for run in fleet.summaries() if run.problem is not None]
    assert (damaged.run_id, damaged.attempts) == ("job-2", 2), "what was known stays"


@pytest.mark.parametrize("seed", range(25))
def test_whatever_is_damaged_all_runs_are_shown(root: Path, seed: int) -> None:
    """Of one run, objects are cut, emptied, of another form, or nonsense that proves itself."""
    damage(root, random.Random(seed))
    problems = looked_at(root)
    assert problems["job-1"] is None
    assert problems["job-3"] is None


def damage(root: Path, chance: random.Random) -> None:
    """Damage one to three objects of the second run."""
    paths = sorted(path for path in (root / "job-2").rglob("*") if path.is_file())
    for path in chance.sample(paths, chance.randint(1, 3)):
        raw = path.read_bytes()
        match chance.randrange(5):
            case 0:
                path.write_bytes(chance.choice(DAMAGES))
            case 1:
                path.write_bytes(raw[: chance.randrange(len(raw))])
            case 2:
                path.unlink()
                path.mkdir()
            case _:
                path.write_bytes(spoiled(raw, chance))


def spoiled(raw: bytes, chance: random.Random) -> bytes:
    """Return a document one of whose values is nonsense, with a checksum if it had one."""
    try:
        body: Any = json.loads(raw)
    except ValueError:
        return raw[::-1]
    proven = body.pop("checksum", None) is not None
    inner = body
    while True:
        name = chance.choice(sorted(inner))
        if not (isinstance(inner[name], dict) and inner[name] and chance.random() < 0.8):
            break
        inner = inner[name]
    inner[name] = chance.choice(HOSTILE)
    text = json.dumps(body, sort_keys=True).encode()
    return with_checksum(text) if proven else text


@pytest.mark.parametrize("phases", [5, [5], "ab", {"a": 1}])
def test_phases_that_nobody_understands_are_that_runs_problem(root: Path, phases: object) -> None:
    """A later version may write them in another form: the other runs are shown."""
    path = root / "job-2" / keys.RUN
    body = json.loads(path.read_bytes())
    body["spec"]["phases"] = phases
    path.write_bytes(json.dumps(body).encode())
    problems = looked_at(root)
    assert "where it runs makes no sense" in (problems.pop("job-2") or "")
    assert problems == {"job-1": None, "job-3": None}
    with pytest.raises(SpotguardError):
        Mirror(str(root)).folder("job-2")
