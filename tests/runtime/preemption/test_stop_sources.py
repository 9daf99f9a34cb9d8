from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.events.event import JobEvent
from spotguard.events.states import EndReason
from spotguard.runtime.preemption.notices import AwsNotices, AzureNotices, FileNotices, Notice
from spotguard.runtime.preemption.stop_sources import Listener
from spotguard.runtime.process.settings import Settings
from spotguard.testing import FakeMetadata
from tests.runtime.preemption.test_notices import GARBAGE, answered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from spotguard.runtime.preemption.stop_consensus import StopRequest


@dataclass
class Heard:
    """A watch and a reporter that write down what they are told."""

    events: list[tuple[JobEvent, dict[str, Any]]] = field(default_factory=list)
    requests: list[StopRequest] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)

    def event(self, kind: JobEvent, **data: Any) -> None:
        """Be told an event."""
        self.events.append((kind, data))

    def request(self, request: StopRequest) -> None:
        """Be asked to stop."""
        self.requests.append(request)

    def withdraw(self, source: str) -> None:
        """Be told that it is over."""
        self.withdrawn.append(source)

    def kinds(self) -> list[JobEvent]:
        """Return the events without their data."""
        return [kind for kind, _ in self.events]


class NoPause(threading.Event):
    """Waits for nothing, and remembers for how long it would have."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Return at once."""
        self.waited.append(timeout)
        return self.is_set()


@dataclass
class Script:
    """A notice source that gives answers in turn, then closes its listener."""

    answers: list[Notice | Exception | None]
    listener: Listener | None = None
    name: str = "aws"
    poll_s: float = 1.0

    def check(self) -> Notice | None:
        """Give the next answer."""
        if not self.answers:
            assert self.listener is not None
            self.listener._closed.set()
            raise OSError("over")
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def settings(**over: Any) -> Settings:
    """Return the settings of a first rank that nobody launched."""
    base: dict[str, Any] = {
        "run_id": "a-run", "attempt": 1, "store_url": "", "rank": 0, "world_size": 1,
        "local_rank": 0, "node": 0, "launched": False,
    }  # fmt: skip
    return Settings(**(base | over))


@pytest.fixture
def listen() -> Iterator[Callable[..., tuple[Listener, Heard]]]:
    """Start listeners, and close them in the end."""
    made: list[Listener] = []

    def start(**over: Any) -> tuple[Listener, Heard]:
        heard = Heard()
        listener = Listener(settings(**over), heard, heard)  # type: ignore[arg-type]
        made.append(listener)
        return listener, heard

    yield start
    for listener in made:
        listener.close()


def poll(listener: Listener, source: Any) -> NoPause:
    """Let `listener` poll `source` to the end of its answers, without a pause."""
    pauses = NoPause()
    listener._closed = pauses
    source.listener = listener
    listener._poll(source)
    return pauses


NOTICE = Notice(source="aws", action="terminate", deadline_at=2_000_000_000.0)
ADVICE = Notice(source="aws", action="rebalance", deadline_at=None, advisory=True)


def test_a_notice_is_reported_once_and_asks_to_stop(listen: Any) -> None:
    """Seen at every poll, it is one event and one request, with the cloud's own deadline."""
    listener, heard = listen()
    later = Notice(source="aws", action="terminate", deadline_at=2_000_000_000.4)
    poll(listener, Script([None, NOTICE, NOTICE, later, NOTICE]))

    assert heard.kinds() == [JobEvent.NOTICE]
    [request] = heard.requests
    assert request.reason is EndReason.PREEMPTED
    assert request.deadline_at == NOTICE.deadline_at
    assert request.message == "aws: terminate"
    assert request.warned_at == pytest.approx(time.time(), abs=60)


def test_a_deadline_that_comes_nearer_asks_again(listen: Any) -> None:
    """Azure's eviction that starts before its time, a file that is rewritten.

    One that is recomputed at each look, or put off, is the notice that is known; one that is named
    at last is told, too.
    """
    listener, heard = listen()
    until = NOTICE.deadline_at or 0.0
    moved = [until, until + 60, until - 1.5, until - 30, until - 31, until + 1]
    notices = [Notice(source="aws", action="terminate", deadline_at=at) for at in (None, *moved)]
    poll(listener, Script([*notices]))

    assert [request.deadline_at for request in heard.requests] == [None, until, until - 30]
    assert heard.kinds() == [JobEvent.NOTICE] * 3
    assert heard.withdrawn == []
    assert listener._noticed_until == until - 30


def test_a_recommendation_only_advises(listen: Any) -> None:
    """A rebalance recommendation is reported, but stops nothing: the node may live for hours."""
    listener, heard = listen()
    poll(listener, Script([ADVICE, ADVICE, NOTICE]))

    assert heard.kinds() == [JobEvent.NOTICE, JobEvent.NOTICE]
    assert heard.events[0][1]["detail"] == "a recommendation only"
    assert len(heard.requests) == 1


def test_a_withdrawn_notice_takes_its_request_back(listen: Any) -> None:
    """And a new one counts again."""
    listener, heard = listen()
    poll(listener, Script([NOTICE, None, None, NOTICE]))

    assert heard.kinds() == [JobEvent.NOTICE, JobEvent.WITHDRAWN, JobEvent.NOTICE]
    assert heard.withdrawn == ["aws"]
    assert [request.source for request in heard.requests] == ["aws", "aws"]


def test_what_one_source_takes_back_stays_another_ones(listen: Any, tmp_path: Path) -> None:
    """A notice file is still there when the cloud's eviction is off: the node is to be left."""
    leaving = tmp_path / "leaving"
    listener, heard = listen(leaving_file=str(leaving))
    told = Notice(source="file", action="file", deadline_at=1_900_000_000.0)
    poll(listener, Script([told], name="file"))
    poll(listener, Script([NOTICE, None]))
    assert heard.withdrawn == ["aws"]
    assert leaving.exists()
    assert listener._noticed_until == told.deadline_at
    poll(listener, Script([told, None], name="file"))
    assert heard.withdrawn == ["aws", "file"]
    assert not leaving.exists()
    assert listener._noticed_until is None


def test_an_interruption_that_becomes_a_recommendation_is_taken_back(
    listen: Any, tmp_path: Path
) -> None:
    """The node is not to be taken any more; that it may be some day stops nothing."""
    leaving = tmp_path / "leaving"
    listener, heard = listen(leaving_file=str(leaving))
    poll(listener, Script([NOTICE, ADVICE]))
    assert heard.kinds() == [JobEvent.NOTICE, JobEvent.WITHDRAWN, JobEvent.NOTICE]
    assert heard.withdrawn == ["aws"]
    assert not leaving.exists()


def test_a_source_that_fails_warns_once(listen: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Five failures in a row are one warning, and questions get rarer; a notice is still seen."""
    listener, heard = listen()
    failures: list[Notice | Exception | None] = [OSError("no route")] * 12
    pauses = poll(listener, Script([*failures, NOTICE]))

    assert heard.kinds() == [JobEvent.WARNING, JobEvent.NOTICE]
    message = heard.events[0][1]["message"]
    assert "the aws notice source does not answer: no route" in message
    assert "HttpPutResponseHopLimit=2" in message, "the way out"
    assert message in caplog.messages
    assert pauses.waited[:6] == [1.0, 1.0, 1.0, 1.0, 5.0, 5.0]
    assert len(heard.requests) == 1


def test_a_short_silence_is_no_warning(listen: Any) -> None:
    """Four failures, an answer, four failures: nobody is bothered."""
    listener, heard = listen()
    four: list[Notice | Exception | None] = [OSError("busy")] * 4
    poll(listener, Script([*four, None, *four, None]))

    assert heard.events == []


@pytest.mark.parametrize(
    "problem",
    [
        *(KeyError("time"), TypeError("list"), AttributeError("get"), ValueError("soon")),
        *(UnicodeDecodeError("utf-8", b"", 0, 1, ""), RecursionError(), RuntimeError()),
        *(TimeoutError(), ConnectionResetError()),
    ],
    ids=lambda problem: type(problem).__name__,
)
def test_no_error_ends_the_poller(listen: Any, problem: Exception) -> None:
    """Whatever an answer makes of the reader, the notice after it is still heard."""
    listener, heard = listen()
    poll(listener, Script([problem, problem, NOTICE]))

    assert len(heard.requests) == 1


@pytest.mark.parametrize("make", [AwsNotices, AzureNotices])
def test_garbage_never_stops_a_job_nor_the_poller(listen: Any, make: Any) -> None:
    """Every kind of garbage in turn, from the real readers: a warning, nothing else."""
    listener, heard = listen()
    source = answered(make(), *((200, text, {}) for text in GARBAGE), (503, "", {}))
    pauses = NoPause()
    listener._closed = pauses
    check = source.check

    def check_until_the_end() -> Notice | None:
        if len(pauses.waited) > 30:
            pauses.set()
        found: Notice | None = check()
        return found

    source.check = check_until_the_end
    listener._poll(source)

    assert heard.requests == []
    assert set(heard.kinds()) == {JobEvent.WARNING}


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_a_real_service_is_heard(listen: Any, cloud: str) -> None:
    """Through its own thread and protocol, after a reset, the request arrives."""
    with FakeMetadata(cloud) as service:
        service.fail("reset")
        service.notice()
        _, heard = listen(metadata=f"{cloud}={service.url}")
        end = time.monotonic() + 10
        while not heard.requests and time.monotonic() < end:
            time.sleep(0.005)

    assert heard.requests[0].reason is EndReason.PREEMPTED


def test_a_file_and_a_cloud_are_both_heard(listen: Any, tmp_path: Path) -> None:
    """The notice file is asked besides the cloud."""
    path = tmp_path / "notice"
    path.touch()
    with FakeMetadata("aws") as service:
        _, heard = listen(metadata=f"aws={service.url}", notice_file=str(path))
        end = time.monotonic() + 10
        while not heard.requests and time.monotonic() < end:
            time.sleep(0.005)

    assert heard.requests[0].message == "file: file"


def test_one_rank_of_a_node_asks(listen: Any, tmp_path: Path) -> None:
    """The others hear of it from that one: eight ranks do not ask eight times."""
    path = tmp_path / "notice"
    path.touch()
    before = threading.active_count()
    listen(local_rank=1, notice_file=str(path), metadata="aws=http://127.0.0.1:1")

    assert threading.active_count() - before <= 1  # that of the signals


def test_own_limits_stop_the_job_by_themselves(listen: Any) -> None:
    """Budget and deadline are kept by the job: the controller may be dead."""
    past = time.time() - 5
    _, heard = listen(budget_stop_at=past, deadline_stop_at=past)
    end = time.monotonic() + 5
    while len(heard.requests) < 2 and time.monotonic() < end:
        time.sleep(0.001)

    assert {r.reason for r in heard.requests} == {EndReason.BUDGET, EndReason.DEADLINE}
    assert all(r.deadline_at is None for r in heard.requests)


def test_sigterm_keeps_the_nearer_deadline(listen: Any) -> None:
    """Alone, SIGTERM leaves the place's grace; after a notice, what is left of that one."""
    listener, heard = listen(grace_s=30.0)
    listener._on_sigterm()
    near = Notice(source="aws", action="terminate", deadline_at=time.time() + 4)
    poll(listener, Script([near]))
    listener._on_sigterm()
    listener._noticed["aws"] = time.time() - 10
    listener._on_sigterm()

    alone, noticed, after, late = heard.requests
    assert alone.reason is EndReason.TERMINATED
    assert (alone.deadline_at or 0) - time.time() == pytest.approx(30, abs=2)
    assert after.deadline_at == noticed.deadline_at
    assert late.deadline_at == pytest.approx(time.time(), abs=2), "never in the past"


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_sigterm_before_the_notice_was_read_is_the_notices(listen: Any, cloud: str) -> None:
    """Google sends both at once: whichever is seen first, the attempt was preempted."""
    with FakeMetadata(cloud) as service:
        listener, heard = listen(metadata=f"{cloud}={service.url}", local_rank=1, grace_s=20.0)
        listener._on_sigterm()
        service.notice()
        listener._on_sigterm()

    assert [r.reason for r in heard.requests] == [EndReason.TERMINATED, EndReason.PREEMPTED]
    assert heard.requests[1].deadline_at - time.time() <= 20


def test_sigterm_does_not_wait_for_a_silent_cloud(
    listen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A metadata service that does not answer costs a moment of the grace, no more."""
    monkeypatch.setattr("spotguard.runtime.preemption.stop_sources._ASK_S", 0.01)
    silent = threading.Event()
    monkeypatch.setattr(AwsNotices, "check", lambda _: silent.wait(20) and None)
    listener, heard = listen(metadata="aws=http://127.0.0.1:1", local_rank=1)
    listener._on_sigterm()
    silent.set()

    assert [r.reason for r in heard.requests] == [EndReason.TERMINATED]


def test_a_file_that_is_not_there_is_quiet(tmp_path: Path) -> None:
    """No file, no notice, no failure."""
    assert FileNotices(str(tmp_path / "none")).check() is None


@pytest.mark.parametrize(("age_s", "requests"), [(300, 0), (3, 1)])
def test_a_notice_that_the_machine_outlived_is_not_heeded(
    listen: Any, age_s: float, requests: int
) -> None:
    """One whose time came long before this process is of an earlier life; a late one counts."""
    listener, heard = listen()
    notice = Notice(source="aws", action="terminate", deadline_at=time.time() - age_s)
    poll(listener, Script([notice, notice]))
    assert len(heard.requests) == requests
    assert len(heard.kinds()) >= requests
