from __future__ import annotations

import http.client
import json
import os
import threading
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.errors import UsageError
from spotguard.runtime.preemption import notices
from spotguard.runtime.preemption.notices import (
    AwsNotices,
    AzureNotices,
    FileNotices,
    GcpNotices,
    Notice,
    NoticeSource,
    notice_source,
)
from spotguard.testing import FakeClock, FakeMetadata

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SOURCES: dict[str, Any] = {"aws": AwsNotices, "gcp": GcpNotices, "azure": AzureNotices}
UNUSABLE = (OSError, http.client.HTTPException, ValueError, KeyError)


@pytest.fixture(params=list(SOURCES))
def cloud(request: pytest.FixtureRequest) -> Iterator[FakeMetadata]:
    """A metadata service of each cloud in turn."""
    with FakeMetadata(request.param) as service:
        yield service


def source_of(service: FakeMetadata) -> NoticeSource:
    """Return the source that asks `service`."""
    source: NoticeSource = SOURCES[service.cloud](service.url)
    return source


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent service is given up after a tenth of a second."""
    defaults = notices._Http.__call__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "timeout_s", 0.1)
    monkeypatch.setattr(GcpNotices, "_HOLD_S", -4.9)  # five seconds more than it asks to be held


def test_a_notice_is_seen_with_its_deadline(cloud: FakeMetadata) -> None:
    """Quiet before; then what, from whom and until when, in every cloud's own protocol."""
    source = source_of(cloud)
    assert source.check() is None

    deadline_at = cloud.notice(grace_s=40 if cloud.cloud != "gcp" else 30)
    notice = source.check()

    assert notice is not None
    assert notice.source == cloud.cloud
    assert not notice.advisory
    assert notice.deadline_at is not None
    assert deadline_at - 1.5 < notice.deadline_at < deadline_at + 2.5


def test_a_notice_can_be_taken_back(cloud: FakeMetadata) -> None:
    """Azure withdraws notices for real; whoever does is believed."""
    source = source_of(cloud)
    cloud.notice()
    assert source.check() is not None
    cloud.withdraw()

    assert source.check() is None


@pytest.mark.parametrize("how", [500, 503, 400, "reset", "stall"])
@pytest.mark.usefixtures("impatient")
def test_a_failed_answer_is_an_error_and_no_verdict(cloud: FakeMetadata, how: Any) -> None:
    """A service that fails says neither yes nor no; the next question is answered again."""
    source = source_of(cloud)
    source.check()
    cloud.notice()
    cloud.fail(how)
    with pytest.raises(UNUSABLE):
        source.check()

    found = source.check()
    assert found is not None
    assert found.source == cloud.cloud


def test_nobody_at_the_endpoint_is_an_error() -> None:
    """Outside of its cloud a source fails quickly; it does not claim that all is well."""
    service = FakeMetadata("aws").start()
    service.close()
    for cloud in SOURCES:
        with pytest.raises(OSError, match="refused"):
            SOURCES[cloud](service.url).check()


def test_aws_keeps_its_token_until_it_runs_out() -> None:
    """One token serves six hours of questions; after that a new one is fetched by itself."""
    clock = FakeClock()
    with FakeMetadata("aws", clock=clock) as service:
        source = AwsNotices(service.url)
        for _ in range(3):
            source.check()
        assert [method for method, _ in service.requests].count("PUT") == 1
        clock.advance(AwsNotices._TOKEN_TTL_S + 1)
        service.notice()

        found = source.check()
        assert found is not None
        assert found.action == "terminate"
        assert [method for method, _ in service.requests].count("PUT") == 2


def test_aws_asks_for_the_notice_first() -> None:
    """The recommendation is only asked for when there is no notice."""
    with FakeMetadata("aws") as service:
        source = AwsNotices(service.url)
        source.check()
        service.rebalance()
        advice = source.check()
        service.notice(grace_s=120)
        notice = source.check()

    assert advice == Notice(source="aws", action="rebalance", deadline_at=None, advisory=True)
    assert notice is not None
    assert (notice.action, notice.advisory) == ("terminate", False)


@pytest.mark.parametrize(
    "body",
    [
        '{"action": "hibernate", "time": "2030-01-02T03:04:05Z"}',
        '{"action": "stop", "time": "2030-01-02T03:04:05+00:00"}',
    ],
)
def test_aws_actions_of_any_kind_are_notices(body: str) -> None:
    """Stop and hibernate end the node as well as terminate."""
    notice = answered(AwsNotices(), (200, body, {})).check()

    assert notice is not None
    assert notice.deadline_at == 1_893_553_445


def answered(source: Any, *answers: tuple[int, str, dict[str, str]]) -> Any:
    """Return the source with answers put into its mouth; the last one is given for ever."""
    left = list(answers)

    def http(*_: Any, **__: Any) -> tuple[int, str, dict[str, str]]:
        return left.pop(0) if len(left) > 1 else left[0]

    source._http = http
    if isinstance(source, AwsNotices):
        source._token = "a-token"
    return source


def test_gcp_is_told_at_once() -> None:
    """The long poll answers when the value changes, and holds no one up when it does not."""
    with FakeMetadata("gcp") as service:
        source = GcpNotices(service.url)
        assert source.check() is None
        found: list[tuple[Notice | None, float]] = []

        def wait() -> None:
            found.append((source.check(), time.monotonic()))

        waiting = threading.Thread(target=wait)
        waiting.start()
        while len(service.requests) < 2:
            time.sleep(0.001)
        assert waiting.is_alive()
        noticed_at = time.monotonic()
        service.notice()
        waiting.join()

    assert found[0][0] is not None
    assert found[0][1] - noticed_at < 10, "not only when the poll's 20 s are over"
    assert "wait_for_change=true&timeout_sec=20&last_etag=" in service.requests[1][1]


def test_gcp_without_an_etag_does_not_wait() -> None:
    """A server that gives no etag is asked anew each time, never with a wrong one."""
    source = answered(GcpNotices(), (200, "FALSE", {}))

    assert source.check() is None
    assert source._etag is None
    assert GcpNotices.poll_s > 0, "else such a server is asked without a pause"


def test_azure_names_the_second() -> None:
    """`NotBefore` is the deadline; once the event has started there is no time left."""
    clock = FakeClock(time.time())
    with FakeMetadata("azure", clock=clock) as service:
        source = AzureNotices(service.url)
        deadline_at = service.notice(grace_s=30)
        scheduled = source.check()
        clock.advance(31)
        before = time.time()
        started = [source.check() for _ in range(3)]

    assert scheduled is not None
    assert scheduled.deadline_at == int(deadline_at)
    first = {notice and notice.deadline_at for notice in started}
    assert len(first) == 1, "the same instant, however often it is asked"
    assert before <= (first.pop() or 0) <= time.time()


@pytest.mark.parametrize("kind", ["Reboot", "Redeploy", "Freeze", "Terminate", None])
def test_azure_events_of_other_kinds_are_no_preemption(kind: str | None) -> None:
    """Only `Preempt` takes a spot machine."""
    body = json.dumps({"Events": [{"EventType": kind, "NotBefore": ""}]})

    assert answered(AzureNotices(), (200, body, {})).check() is None


GARBAGE = [
    *("", "[]", "null", "7", '"text"', "{", "<html>", "\x00\xff", "[" * 100_000),
    '{"action": "terminate"}',
    '{"action": "terminate", "time": 5}',
    '{"action": "terminate", "time": "soon"}',
    '{"action": "terminate", "time": "2030-01-02T03:04:05"}',
    '{"Events": [1]}',
    '{"Events": null}',
    '{"Events": [{"EventType": "Preempt", "NotBefore": "soon"}]}',
    '{"Events": [{"EventType": "Preempt", "NotBefore": 7}]}',
]


@pytest.mark.parametrize("cloud", SOURCES)
@pytest.mark.parametrize("text", GARBAGE, ids=lambda text: ascii(text[:40]))
def test_garbage_is_never_a_deadline(cloud: str, text: str) -> None:
    """Whatever a broken service or proxy says, no notice with an invented deadline comes of it."""
    try:
        notice = answered(SOURCES[cloud](), (200, text, {})).check()
    except Exception:  # noqa: BLE001 - the poller outlives any, see test_listening
        return

    assert notice is None


def test_a_file_is_a_notice(tmp_path: Path) -> None:
    """It appears: a notice; it may name its deadline; it goes: the notice is withdrawn."""
    path = tmp_path / "notice"
    source = FileNotices(str(path))
    assert source.check() is None
    path.touch()
    assert source.check() == Notice(source="file", action="file", deadline_at=None)
    path.write_text('{"deadline_at": "2030-01-02T03:04:05Z"}')
    named = source.check()
    assert named is not None
    assert named.deadline_at == 1_893_553_445
    path.unlink()

    assert source.check() is None


def test_the_clock_of_a_files_writer_counts_at_each_look(tmp_path: Path) -> None:
    """One an hour ahead, as on a shared folder: what its notice means does not change with time."""
    path = tmp_path / "notice"
    source = FileNotices(str(path))
    assert source.check() is None
    for left_s in (90, 40):
        now = int(time.time()) + 3600
        at = datetime.fromtimestamp(now + left_s, timezone.utc).isoformat()
        path.write_text(json.dumps({"deadline_at": at}))
        os.utime(path, (now, now))
        first, again = source.check(), source.check()
        assert first is not None
        assert first.deadline_at == pytest.approx(time.time() + left_s, abs=20)
        assert again == first


@pytest.mark.parametrize("text", ["not json", "[]", '{"deadline_at": "soon"}'])
def test_a_file_with_garbage_is_an_error(tmp_path: Path, text: str) -> None:
    """A file that cannot be read is a failed answer, as of any source."""
    path = tmp_path / "notice"
    path.write_text(text)

    with pytest.raises((ValueError, AttributeError)):
        FileNotices(str(path)).check()


def test_the_setting_names_protocol_and_endpoint() -> None:
    """`aws`, `gcp=http://...`, `none`; anything else is refused with what is allowed."""
    assert notice_source("none") is None
    assert notice_source("") is None
    assert isinstance(notice_source("aws"), AwsNotices)
    azure = notice_source("azure=http://127.0.0.1:5")
    assert isinstance(azure, AzureNotices)
    assert azure._http._host == "127.0.0.1:5"
    with pytest.raises(UsageError, match="given 'oracle', allowed are aws, gcp, azure and none"):
        notice_source("oracle")


def test_no_proxy_is_used(monkeypatch: pytest.MonkeyPatch, cloud: FakeMetadata) -> None:
    """The metadata service is link-local: a proxy in the environment must not see the question."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    assert source_of(cloud).check() is None


def _azure_set(*events: dict[str, Any], name: str | None = "vmss_3") -> AzureNotices:
    """Return the source of a machine of a scale set; without a name it does not say which."""
    source = AzureNotices()
    asked: list[str] = []

    def answer(method: str, path: str, headers: Any, **_: Any) -> tuple[int, str, dict[str, str]]:
        asked.append(path)
        if "scheduledevents" in path:
            return 200, json.dumps({"DocumentIncarnation": 1, "Events": events}), {}
        if name is None:
            raise ConnectionResetError
        where = f"/subscriptions/1/resourceGroups/g/providers/x/virtualMachines/{name}"
        compute = {"name": name, "resourceId": where, "osProfile": {"computerName": f"{name}-host"}}
        return 200, json.dumps({"compute": compute}), {}

    source._http = answer  # type: ignore[assignment]
    return source


def _eviction(*machines: Any, at: str = "Mon, 19 Sep 2022 18:29:47 GMT") -> dict[str, Any]:
    return {"EventId": "x", "EventType": "Preempt", "Resources": list(machines), "NotBefore": at}


@pytest.mark.parametrize(
    ("machines", "name", "ours"),
    [
        (("vmss_17",), "vmss_3", False),
        (("vmss_17", "vmss_3"), "vmss_3", True),
        (("VMSS_3",), "vmss_3", True),
        (("vmss_3-host",), "vmss_3", True),
        (("/a/b/virtualMachines/vmss_3",), "vmss_3", True),
        ((), "vmss_3", True),
        ((7,), "vmss_3", True),
        (("vmss_17",), None, True),
    ],
)
def test_the_eviction_of_another_machine_of_the_set_is_not_ours(
    machines: tuple[Any, ...], name: str | None, ours: bool
) -> None:
    """Azure tells all machines of a scale set; who cannot tell whose it is heeds it."""
    source = _azure_set(_eviction(*machines), name=name)
    assert (source.check() is not None) is ours


def test_of_several_evictions_the_earliest_of_ours_counts() -> None:
    """One of another machine hides nothing."""
    later = _eviction("vmss_3", at="Mon, 19 Sep 2022 18:40:00 GMT")
    source = _azure_set(_eviction("vmss_17"), later, _eviction("vmss_3"))
    alone = _azure_set(_eviction("vmss_3"))
    notice, of_one = source.check(), alone.check()
    assert notice is not None
    assert of_one is not None
    assert notice.deadline_at == of_one.deadline_at
