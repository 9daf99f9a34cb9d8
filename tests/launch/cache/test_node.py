"""The agent of a node, with one rank of a script of the test's."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spotguard.events import env, keys
from spotguard.events.event import Event, JobEvent
from spotguard.launch.cache.keeping import Keeping
from spotguard.launch.cache.listing import CacheListing
from spotguard.launch.cache.node import INDUCTOR, NodeCache, Wish
from spotguard.shared.cache_folders import COMPILED
from spotguard.shared.units import SystemClock
from spotguard.storage import FileStore, PrefixedStore
from spotguard.testing import FaultyStore, MemoryStore
from tests.launch.cache.nodes import KEY, Node
from tests.launch.test_agent import agent

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.shared.units import Clock

RUN = "job-1"
TRAIN = f"""
import json, os, pathlib, sys, time
root = pathlib.Path.home() / ".cache/words"
there = sorted(path.name for path in root.glob("*"))
compiled = pathlib.Path(os.environ[{INDUCTOR!r}])
there += sorted(path.name for path in compiled.glob("*"))
assert {env.CACHE_KEY!r} not in os.environ
assert os.path.isfile(os.environ.get({env.SAVING!r}, __file__))
print(json.dumps(there), flush=True)
root.mkdir(parents=True, exist_ok=True)
compiled.mkdir(parents=True, exist_ok=True)
attempt = os.environ["SPOTGUARD_ATTEMPT"]
(root / f"of-attempt-{{attempt}}").write_text(attempt)
(root / "token").write_text("login")
(compiled / f"kernel-{{attempt}}").write_text(attempt)
raise SystemExit(int(os.environ["CODE"]))
"""


@pytest.fixture(autouse=True)
def _no_folder_of_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sets it in a process that has compiled something."""
    monkeypatch.delenv(INDUCTOR, raising=False)


def variables(tmp_path: Path, attempt: int, code: int, **more: str) -> dict[str, str]:
    """Return what an agent is told; each attempt has a node, and so a home, of its own."""
    home = tmp_path / f"home-{attempt}"
    home.mkdir(exist_ok=True)
    wish = {"folders": ["~/.cache/words", COMPILED], "most_bytes": 10**6}
    return {
        env.RUN_ID: RUN,
        env.STORE: str(tmp_path / "store"),
        env.ATTEMPT: str(attempt),
        env.CACHE: json.dumps(wish),
        env.CACHE_KEY: KEY,
        "HOME": str(home),
        "CODE": str(code),
        **more,
    }


def printed_by(tmp_path: Path, attempt: int, code: int, **more: str) -> list[str]:
    """Run an attempt on a node of its own; return the files that its script found."""
    folder = tmp_path / f"node-{attempt}"
    folder.mkdir()
    with agent(folder, TRAIN, **variables(tmp_path, attempt, code, **more)) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == (1 if code == 75 else code), err.decode()
    found: list[str] = json.loads(out.decode().splitlines()[0])
    return found


def cache_of(
    node: Node,
    said: list[str],
    *,
    told: Callable[[], bool] = lambda: False,
    clock: Clock | None = None,
) -> NodeCache:
    """Return a node's cache, on its clock unless another is given."""
    return NodeCache(
        Wish(tuple(node.folders), 10**6, KEY),
        node.owner,
        lambda: node.store,
        secrets=(),
        clock=clock or node.clock,
        told=told,
        say=said.append,
    )


def test_the_next_node_has_them_before_its_script_begins(tmp_path: Path) -> None:
    """What an attempt kept, and what it compiled, by then; its login is not among them."""
    assert printed_by(tmp_path, 1, 75) == []
    assert printed_by(tmp_path, 2, 75) == ["of-attempt-1", "kernel-1"]
    assert printed_by(tmp_path, 3, 75) == ["of-attempt-1", "of-attempt-2", "kernel-1", "kernel-2"]
    files = (tmp_path / "store" / RUN / "attempts/000002/events").glob("*")
    told = [event for file in files if (event := Event.from_json(file.read_bytes()))]
    (restored,) = [event for event in told if event.kind == JobEvent.CACHE_RESTORED.value]
    assert restored.data["files"] == 2
    assert restored.data["from_attempt"] == 1
    stored = b"".join(
        path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()
    )
    assert b"login" not in stored


def test_a_run_that_is_done_keeps_no_more(tmp_path: Path) -> None:
    """Nobody comes after it; its nodes are released at once."""
    printed_by(tmp_path, 1, 0)
    store = PrefixedStore(FileStore(tmp_path / "store"), RUN)
    assert list(store.list(keys.CACHE_LISTINGS)) == []


def test_a_folder_that_the_user_has_named_for_compiled_code_stays_theirs(tmp_path: Path) -> None:
    """What they set is not changed."""
    mine = str(tmp_path / "mine")
    printed_by(tmp_path, 1, 75, **{INDUCTOR: mine})
    assert [path.name for path in Path(mine).iterdir()] == ["kernel-1"]
    store = PrefixedStore(FileStore(tmp_path / "store"), RUN)
    raw = store.get(keys.cache_listing(1, 0))
    assert [file.path for file in CacheListing.opened(raw, KEY, RUN).files] == ["of-attempt-1"]


def test_without_the_key_nothing_is_kept(tmp_path: Path) -> None:
    """Nobody could prove what would be restored."""
    printed_by(tmp_path, 1, 75, **{env.CACHE_KEY: "", INDUCTOR: str(tmp_path / "mine")})
    assert not (tmp_path / "store" / RUN / "cache").exists()


def test_a_store_that_cannot_be_read_holds_up_nothing(tmp_path: Path) -> None:
    """It is told, and the script begins with empty folders."""
    node = Node(tmp_path, FaultyStore(MemoryStore()).fail("list", times=None), attempt=2)
    said: list[str] = []
    cache = cache_of(node, said)
    assert cache.restore().files == 0
    assert len(said) == 1
    assert "could not be read" in said[0]


def test_a_node_that_is_told_to_leave_ends_as_ever(tmp_path: Path) -> None:
    """It keeps what it has, for some seconds, after the job has saved."""
    script = TRAIN.replace("raise SystemExit", "time.sleep(0.5)\nraise SystemExit")
    with agent(tmp_path, script, **variables(tmp_path, 1, 75)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1
    assert (tmp_path / "store" / RUN / "cache/listings/000001-00000").exists()


def test_an_attempt_in_place_waits_for_no_round(tmp_path: Path) -> None:
    """A round that waits for a save, or stores for an hour, holds up no attempt that follows."""
    node = Node(tmp_path, MemoryStore())
    node.write("a", b"a")
    clock = SystemClock()
    leaves = threading.Event()
    asked = threading.Event()

    def told() -> bool:
        asked.set()
        return not leaves.is_set()

    cache = cache_of(node, [], told=told, clock=clock)
    cache.restore()
    asked.clear()
    saving = cache.start()[env.SAVING]
    with pytest.MonkeyPatch.context() as soon:
        soon.setattr("spotguard.launch.cache.keeping._HOT_S", 0.0)
        storing = threading.Thread(target=cache._try_round, kwargs={"final": False})
        storing.start()
        assert asked.wait(60)
        cache.go_on(attempt=2, place=0, places=1)
        leaves.set()
        storing.join(60)
    assert [info.key for info in node.store.list(keys.CACHE_LISTINGS)] == [keys.cache_listing(2, 0)]
    cache.finish(goes_on=False)
    assert not Path(saving).exists()


def test_half_of_a_file_is_not_kept_for_all_of_it(tmp_path: Path) -> None:
    """Who was killed may have been writing it; what left in order has closed it."""
    node = Node(tmp_path, MemoryStore())
    written_at = node.write("tokens.bin", b"half").stat().st_mtime
    keeping = Keeping(
        node.folders,
        node.owner,
        most_bytes=10**6,
        secrets=(),
        clock=node.clock,
        wait=lambda: None,
        had=CacheListing(),
        wall=lambda: written_at + 5,
    )

    def kept() -> list[str]:
        raw = node.store.get(keys.cache_listing(1, 0))
        return [file.path for file in CacheListing.opened(raw, KEY, RUN).files]

    keeping.round(node.store, final=True, closed=False)
    assert kept() == []
    keeping.round(node.store, final=True, closed=True)
    assert kept() == ["tokens.bin"]


def earlier(tmp_path: Path, files: int) -> MemoryStore:
    """Return a store in which the first attempt has kept so many files."""
    store = MemoryStore()
    first = Node(tmp_path / "first", store)
    for number in range(files):
        first.write(f"{number:03}", b"x" * (number + 1))
    first.keeping.round(store)
    return store


def test_what_could_not_be_listed_at_first_is_not_hidden_by_what_is_new(tmp_path: Path) -> None:
    """The next node has it all the same: nothing is listed before that is known."""
    store = FaultyStore(earlier(tmp_path, 2))
    node = Node(tmp_path / "second", store, attempt=2)
    said: list[str] = []
    cache = cache_of(node, said)
    store.fail("list", times=None)
    assert cache.restore().files == 0
    assert "could not be read" in said[0]
    node.write("new", b"new")
    with pytest.MonkeyPatch.context() as soon:
        soon.setattr("spotguard.launch.cache.keeping._HOT_S", -1.0)
        cache._saving = str(tmp_path / "nobody-saves")
        cache._try_round(final=False)
        assert store.head(keys.cache_listing(2, 0)) is None
        store.heal()
        cache._try_round(final=False)
    raw = store.get(keys.cache_listing(2, 0))
    listed = [file.path for file in CacheListing.opened(raw, KEY, RUN).files]
    assert sorted(listed) == ["000", "001", "new"]


def test_a_restore_ends_after_some_minutes_and_the_rest_stays_listed(tmp_path: Path) -> None:
    """Nodes that are ready wait for this one: what is not back by then is for the script."""
    node = Node(tmp_path / "second", earlier(tmp_path, 50), attempt=2)

    def a_minute_passes() -> bool:
        if any(path.is_file() for path in (tmp_path / "second").rglob("0*")):
            node.clock.advance(60.0)  # not earlier: which thread is first is the machine's choice
        return False

    said: list[str] = []
    restored = cache_of(node, said, told=a_minute_passes).restore()
    assert 0 < restored.files < 50
    assert restored.files + len(restored.later.files) == 50
    assert any("takes too long" in words for words in said)
