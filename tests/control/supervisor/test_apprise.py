"""Alerts by apprise itself, to a server on loopback; no secret of a URL gets out."""

from __future__ import annotations

import json
import logging
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.cli.main import main
from spotguard.control.journal.ledger import Ledger
from spotguard.control.journal.record import Kind
from spotguard.control.supervisor.notify import Notifier, check_urls, post_to, public_name
from spotguard.errors import MissingExtra, SpecError
from spotguard.testing import FakeClock
from tests.control.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("apprise", reason="apprise is missing")
pytestmark = pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")
"""Of a plugin of apprise's, when it reads all of them."""
BODY = {"text": "spotguard: job-1: it ended", "name": "job"}


class Server(ThreadingHTTPServer):
    """Keeps what it was sent; answers with `code`."""

    code = 200
    heard: list[dict[str, Any]]


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        """Keep a JSON body."""
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.heard.append(json.loads(body))
        self.send_response(self.server.code)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    """A server that apprise's `json://` and our webhooks can tell."""
    with Server(("127.0.0.1", 0), _Handler) as made:
        made.heard = []
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def _url(server: Server, scheme: str = "json") -> str:
    return f"{scheme}://hush:hush2@127.0.0.1:{server.server_address[1]}/hush3"


def test_apprise_tells_what_a_webhook_would(server: Server) -> None:
    """By its own scheme; the text is the same, and a webhook stays one."""
    assert post_to(_url(server), BODY) is None
    assert server.heard[0]["message"] == BODY["text"]
    assert "job" in server.heard[0]["title"]
    assert post_to(f"http://127.0.0.1:{server.server_address[1]}/x", BODY) is None
    assert server.heard[1] == BODY


def test_what_fails_says_so_without_the_url(
    server: Server,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Neither our log nor apprise's own has any of it."""
    server.code = 500
    world = World(tmp_path, spec={"notify": [_url(server)]})
    with caplog.at_level(logging.DEBUG), world.journal() as journal:
        journal.append(Kind.ALERT.value, at=1.0, data={"percent": 50})
        Notifier([_url(server)], Ledger(journal, world.clock), FakeClock()).tell()
        assert post_to("json://127.0.0.1:9/hush", BODY) == "it was not taken"
    said = capfd.readouterr()
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("spotguard")]
    assert any("json could not be notified" in line for line in ours)
    for text in (*ours, said.out, said.err):
        assert "hush" not in text
    assert not [each for each in caplog.records if each.name == "apprise" and "hush" in str(each)]


def test_only_a_scheme_is_ever_named() -> None:
    """In apprise's URLs even the host may be a token."""
    assert public_name("slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnl/#general") == "slack"
    assert public_name("https://hooks.example.com/services/hush") == "hooks.example.com"
    with pytest.raises(SpecError) as caught:
        check_urls(["https://a.example/b", "nonsense://hush"])
    assert "nonsense://" in str(caught.value)
    assert "hush" not in str(caught.value)


def test_without_apprise_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is launched; webhooks need nothing."""
    monkeypatch.setitem(sys.modules, "apprise", None)
    check_urls(["https://a.example/b"])
    with pytest.raises(MissingExtra) as caught:
        check_urls(["ntfy://topic"])
    assert "spotguard[alerts]" in caught.value.hint


def test_a_controller_tells_a_preemption_once(tmp_path: Path) -> None:
    """As an entry of the journal, so that the next controller does not tell it again."""
    from spotguard.testing.job import JobFate

    world = World(
        tmp_path,
        spec={"notify": ["https://a.example/b"], "notify_on": ["preempted"]},
        fates={1: JobFate(how="notice", at_s=6)},
        total_steps=60,
    )
    told: list[str] = []

    def post(_: str, body: dict[str, Any]) -> None:
        told.append(body["text"])

    with world.journal() as journal:
        supervisor = world.supervisor(journal)
        supervisor._notifier._post = post
        supervisor.run()
    assert len(told) == 1
    assert "attempt 1 ended: preempted" in told[0]
    assert world.kinds().count("noted") == 1


def test_the_command_tries_each_of_them(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And says which did not work, by a name that is no secret."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert main(["notify", "--test"]) == 2
    assert "nobody is told" in capsys.readouterr().err
    (tmp_path / "spotguard.toml").write_text(
        f'notify = ["{_url(server)}", "http://127.0.0.1:9/hush"]\nnotify_on = ["ended"]\n'
    )
    assert main(["notify"]) == 0
    said = capsys.readouterr()
    assert said.out == "told of: ended\njson\n127.0.0.1\n"
    assert server.heard == []
    assert main(["notify", "--test"]) == 3
    said = capsys.readouterr()
    assert "json: told" in said.out
    assert "127.0.0.1: ConnectionError" in said.out
    assert "1 of 2 could not be told" in said.err
    assert "hush" not in said.out + said.err
    (tmp_path / "spotguard.toml").write_text('notify = ["hush"]\n')
    assert main(["notify"]) == 2
    assert "hush" not in capsys.readouterr().err
