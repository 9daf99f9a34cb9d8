from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.control.journal.record import JOB_PREFIX, Kind, Limits
from spotguard.control.status import history_words
from spotguard.control.status.history_words import history_lines
from spotguard.events.event import JobEvent
from spotguard.shared.json_documents import document
from spotguard.testing.job import JobFate
from tests.control.made import Line, ended, launched, training
from tests.control.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

    from spotguard.control.journal.journal import Entry

_EXPECTED = {
    Kind.INTENDED.value,
    Kind.LAUNCHED.value,
    Kind.ATTEMPT_ENDED.value,
    Kind.SETTLED.value,
    Kind.NODE_ENDED.value,
    Kind.DOWN_ASKED.value,
    JobEvent.STARTED.value,
    JobEvent.SAVED.value,
    JobEvent.NOTICE.value,
    JobEvent.ENDED.value,
}


def test_every_act_is_a_sentence_with_time_and_cost(tmp_path: Path) -> None:
    """Nothing that happened by itself is missing; costs only grow; no preemption is red."""
    fates = {1: JobFate(how="notice", at_s=6), 2: JobFate(how="lose", at_s=6)}
    world = World(tmp_path, limits=Limits(budget_usd=9.0, nodes_min=2, nodes_max=2), fates=fates)
    world.run()
    with world.journal() as journal:
        lines = list(history_lines(journal.events()))

    assert {line.kind for line in lines} >= _EXPECTED
    assert all(line.text and "{" not in line.text for line in lines)
    assert [line.at for line in lines] == sorted(line.at for line in lines)
    assert all(line.cost_usd is not None for line in lines)
    assert lines[-1].cost_usd == world.spent_usd()
    assert not [line for line in lines if line.colour == "red"]
    texts = "\n".join(line.text for line in lines)
    assert "launching 2 nodes in fake/here/here-a/thought at $1.00 per node and hour" in texts
    assert "node 0 was lost: killed without notice" in texts


def test_the_story_never_shows_values_of_variables(tmp_path: Path) -> None:
    """The journal holds the job's variables; the story does not."""
    world = World(tmp_path)
    with world.journal() as journal:
        lines = list(history_lines(journal.events()))
    assert "spec" not in (lines[0].data or {})


def test_events_with_missing_data_are_still_told(tmp_path: Path) -> None:
    """A job of another version may say less, or more kinds, than this one knows."""
    world = World(tmp_path)
    with world.journal() as journal:
        for kind in [*(kind.value for kind in JobEvent), "something_new"]:
            journal.append(JOB_PREFIX + kind, at=world.clock.now(), attempt=1, data={})
        lines = list(history_lines(journal.events()))
    assert len(lines) == 1 + len(JobEvent) + 1
    assert lines[-1].text == "something new"


def test_nodes_that_went_beside_the_next_ones_are_told(tmp_path: Path) -> None:
    """A run on a cloud may have them after an interruption."""
    world = World(tmp_path)
    lines: tuple[Line, ...] = (
        *launched(1.0),
        training(3.0),
        ended(9.0, "preempted"),
        ("released", 12.0, 1, {"gone_at": 11.0}),
    )
    with world.journal() as journal:
        for kind, at, attempt, data in ((*line, {})[:4] for line in lines):
            journal.append(kind, at=at, attempt=attempt, data=data)
        told = list(history_lines(journal.events()))
    (gone,) = [line for line in told if line.kind == "released"]
    assert gone.text == "the nodes of attempt 1 are gone"


def test_a_batch_that_follows_the_ranks_is_told(tmp_path: Path) -> None:
    """As a sentence, and with its numbers for `--json`."""
    told = {"message": "global batch 48 → 32, ...", "global_batch_size": 32, "lr_factor": 2 / 3}
    world = World(tmp_path)
    with world.journal() as journal:
        rescaled = JOB_PREFIX + JobEvent.RESCALED.value
        journal.append(rescaled, at=world.clock.now(), attempt=2, data=told)
        line = document(list(history_lines(journal.events()))[-1])
    assert (line["kind"], line["text"], line["data"]) == ("rescaled", told["message"], told)


def test_the_story_is_by_time_though_news_arrive_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In little memory: only so many lines are held back as may be overtaken."""
    monkeypatch.setattr(history_words, "_LATE", 4)
    world = World(tmp_path)
    with world.journal() as journal:
        for number in range(50):
            late_s = 2.5 if number % 5 else 0.0
            at = world.clock.now() + 10 + number - late_s
            journal.append(JOB_PREFIX + "warning", at=at, attempt=1, data={"message": str(number)})
        read = 0

        def entries() -> Iterator[Entry]:
            nonlocal read
            for entry in journal.read():
                read += 1
                yield entry

        lines = history_lines(entries())
        first = next(lines)
        assert read == 5
        told = [first, *lines]
    assert len(told) == 51
    assert [line.at for line in told] == sorted(line.at for line in told)


def test_an_empty_journal_has_no_story() -> None:
    """Nothing happened, nothing is told."""
    assert list(history_lines([])) == []


def test_nodes_that_were_charged_for_before_they_were_up(tmp_path: Path) -> None:
    """A cloud charges from the request on, perhaps minutes before all nodes are up: it is said."""
    world = World(tmp_path)
    asked_at = world.clock.now()
    with world.journal() as journal:
        for passed_s in (480.0, 2.0):
            journal.append(
                Kind.CLUSTER_UP.value, at=asked_at + passed_s, attempt=1, data={"at": asked_at}
            )
        texts = [line.text for line in history_lines(journal.events())]
    assert texts[-1] == "the nodes are up, and charged for since 8 min 00 s"
    assert texts[-2] == "the nodes are up, and charged for since 2.0 s"
