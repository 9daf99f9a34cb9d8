from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.errors import LauncherFailure
from spotguard.launch.base import Unreachable
from spotguard.launch.skypilot import sdk as sdk_module
from spotguard.launch.skypilot import together
from spotguard.launch.skypilot.together import AskedTogether

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES = [f"job-{number}" for number in range(20)]


class Slow:
    """Answers when it may, and remembers what it was asked for."""

    def __init__(self, broken: str = "") -> None:
        self.rounds: list[list[str]] = []
        self.may_answer = threading.Event()
        self.is_asked = threading.Event()
        self._broken = broken

    def __call__(self, names: Sequence[str]) -> dict[str, str]:
        """Return each name's own answer, unless one breaks the question."""
        self.rounds.append(sorted(names))
        self.is_asked.set()
        self.may_answer.wait()
        if self._broken in names:
            raise Unreachable(f"{self._broken} hangs")
        return {name: f"answer on {name}" for name in names if name != "job-7"}


def ask_all(asked: AskedTogether[str], slow: Slow) -> list[Any]:
    """Ask for the first, and for all others while its answer is under way; return what is said."""

    def about(name: str) -> str | LauncherFailure | None:
        try:
            return asked.about(name)
        except LauncherFailure as problem:
            return problem

    with ThreadPoolExecutor(len(NAMES)) as crew:
        first = crew.submit(about, NAMES[0])
        slow.is_asked.wait()
        others = [crew.submit(about, name) for name in NAMES[1:]]
        while len(asked._next.names) < len(others):
            pass
        slow.may_answer.set()
        return [each.result() for each in (first, *others)]


def test_who_asks_meanwhile_is_answered_in_one_round() -> None:
    """Twenty clusters, two questions; each hears of its own, also that there is none."""
    slow = Slow()
    said = ask_all(AskedTogether(slow), slow)
    assert said == [None if name == "job-7" else f"answer on {name}" for name in NAMES]
    assert slow.rounds == [NAMES[:1], sorted(NAMES[1:])]


def test_a_cluster_that_breaks_the_question_breaks_only_its_own() -> None:
    """The others are asked for again, each alone."""
    slow = Slow(broken="job-3")
    said = ask_all(AskedTogether(slow), slow)
    assert isinstance(said[3], Unreachable)
    assert [word for word in said if isinstance(word, Unreachable)] == [said[3]]
    assert said[4] == "answer on job-4"


def test_one_that_hangs_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next round begins beside it."""
    monkeypatch.setattr(together, "_PATIENCE_S", 0.0)
    hangs = threading.Event()

    def ask(names: Sequence[str]) -> dict[str, str]:
        if "job-0" in names:
            hangs.wait()
        return dict.fromkeys(names, "it is up")

    asked = AskedTogether(ask)
    with ThreadPoolExecutor(1) as crew:
        first = crew.submit(asked.about, "job-0")
        while asked._next.names or not asked._one.locked():
            pass
        assert asked.about("job-1") == "it is up"
        assert not first.done()
        hangs.set()
        assert first.result() == "it is up"


def test_skypilot_is_asked_for_clusters_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request refreshes them all; its answer may have another order, and lack some."""
    sky = pytest.importorskip("sky")
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(sky, "status", lambda **given: asked.append(given))
    monkeypatch.setattr(sky, "get", lambda _: [{"name": "b"}, {"name": "a"}])
    assert sdk_module._statuses(["a", "b", "c"]) == {"a": {"name": "a"}, "b": {"name": "b"}}
    assert asked == [{"cluster_names": ["a", "b", "c"], "refresh": sky.StatusRefreshMode.FORCE}]
