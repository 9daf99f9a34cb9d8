"""`spotguard drill`: the verdict in words, as a document, and as an exit code."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.drill.run import DrillOptions

if TYPE_CHECKING:
    from tests.cli.conftest import Cli


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One state that is not restored."""

    variable: str
    label: str
    step: int
    detail: str


@dataclass
class FakeDrill:
    """Gives the verdict that the test lays out, and remembers what it was asked."""

    findings: list[Finding] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __call__(self, script: str, args: Any, flags: Any, options: DrillOptions, tell: Any) -> Any:
        """Tell one thing, then return itself as the report."""
        self.asked.append((script, list(args), flags, options))
        tell("attempt 1 of 5: undisturbed")
        return self

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    @property
    def summary(self) -> str:
        """The verdict in a sentence."""
        return "bitwise the same" if self.passed else "1 state is not restored"

    def to_json(self) -> dict[str, Any]:
        """Return the document."""
        return {"schema": 1, "passed": self.passed}


@pytest.fixture
def drill(monkeypatch: pytest.MonkeyPatch) -> FakeDrill:
    """Put a fake in the drill's place."""
    fake = FakeDrill()
    monkeypatch.setattr("spotguard.api.doctor.run_drill", fake)
    return fake


def test_a_passed_drill_exits_with_0_and_tells_its_progress(
    cli: Cli, drill: FakeDrill, script: str
) -> None:
    """Progress goes to stderr, the verdict to stdout; the options arrive."""
    said = cli("drill", script, "--nodes", "3", "--kills", "5", "--env", "A=b", "--", "--lr", "1")
    assert said.code == 0
    assert "PASS  bitwise the same" in said.out
    assert "undisturbed" in said.err
    options = DrillOptions(nodes=3, kills=5, steps=None, seed=0)
    assert drill.asked == [(script, ["--lr", "1"], {"env": {"A": "b"}}, options)]


def test_a_failed_drill_names_the_state_and_the_step_and_exits_with_10(
    cli: Cli, drill: FakeDrill, script: str
) -> None:
    """The user learns what to track, and where the two runs part."""
    drill.findings = [
        Finding(variable="scheduler", label="scheduler", step=41, detail="lr 0.1 is 0.2 [x]")
    ]
    said = cli("drill", script)
    assert said.code == 10
    for word in ("FAIL", "scheduler", "41", "lr 0.1 is 0.2 [x]"):
        assert word in said.out


def test_drill_json_is_one_document(cli: Cli, drill: FakeDrill, script: str) -> None:
    """Progress does not spoil it."""
    assert json.loads(cli("drill", script, "--json").out) == {"schema": 1, "passed": True}


@pytest.mark.parametrize("option", ["--nodes", "--kills", "--steps"])
def test_a_drill_of_nothing_is_a_usage_error(
    cli: Cli, drill: FakeDrill, script: str, option: str
) -> None:
    """Zero nodes, kills or steps would prove nothing."""
    said = cli("drill", script, option, "0")
    assert said.code == 2
    assert option in said.err
    assert drill.asked == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_who_ends_a_drill_ends_what_it_began(
    number: signal.Signals, cli: Cli, drill: FakeDrill, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`timeout`, a CI job that is cancelled and a closed terminal are heard as Ctrl-C is."""
    ended: list[bool] = []

    def run(*_: Any) -> None:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            ended.append(True)
            raise

    usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    monkeypatch.setattr("spotguard.api.doctor.run_drill", run)
    before = signal.signal(number, usual)  # of a suite in the background it may be ignored
    try:
        assert cli("drill", script).code == 130
        assert ended == [True]
        assert signal.getsignal(number) == usual
    finally:
        signal.signal(number, before)


def test_a_signal_that_is_ignored_ends_no_drill(
    cli: Cli, drill: FakeDrill, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nohup spotguard drill` outlives its terminal."""

    def run(*told: Any) -> Any:
        signal.raise_signal(signal.SIGHUP)
        return drill(*told)

    monkeypatch.setattr("spotguard.api.doctor.run_drill", run)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert cli("drill", script).code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_need_not_matter_is_told_too(cli: Cli, script: str, drill: FakeDrill) -> None:
    """Such as that some interruptions came too late to prove anything."""
    drill.notes = ["only 2 of 5 interruptions hit before the job was done"]
    assert "note: only 2 of 5 interruptions hit" in cli("drill", script).out
