"""Who may ask the dashboard what: attacks that a browser, or its user, can be made to send."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from spotguard.control import api
from spotguard.errors import EnvironmentFailure, UsageError
from spotguard.pages.dashboard.app import dashboard
from spotguard.pages.dashboard.feed import Feed
from spotguard.pages.dashboard.serve import token_in
from tests.control.run_folders import make_run
from tests.pages.hostile_text import hostile_run

if TYPE_CHECKING:
    from pathlib import Path

TOKEN = "a-token-of-some-length"
PORT = 8650
OWN = f"http://127.0.0.1:{PORT}"
KNOWN = {"authorization": f"Bearer {TOKEN}"}
ACT = {**KNOWN, "x-spotguard": "1", "content-type": "application/json", "origin": OWN}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with two runs, which nothing controls."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    hostile_run(tmp_path / "home")
    make_run(tmp_path / "home", "job-2", settled=True)
    return tmp_path / "home"


def ask(
    path: str, *, method: str = "GET", headers: dict[str, str] | None = None, **more: Any
) -> httpx.Response:
    """Return the answer to one request, without following it."""
    base = more.pop("base", OWN)
    read_only = more.pop("read_only", False)

    async def go() -> httpx.Response:
        fleet = api.fleet()
        fleet.refresh()
        feed = Feed(fleet, read_only=read_only)
        app = dashboard(feed, token=TOKEN, port=PORT, read_only=read_only)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=base) as client:
            answer = await client.request(method, path, headers=headers, **more)
        await feed.close()
        return answer

    return asyncio.run(go())


PLACES = ("/", "/runs/job-1", "/events", "/events/job-1", "/metrics", "/nothing")


@pytest.mark.parametrize("path", PLACES)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {TOKEN}"},
        {"cookie": f"spotguard-{PORT}=wrong"},
        {"cookie": f"spotguard-{PORT + 1}={TOKEN}"},
        {"cookie": "=;;;\x01="},
    ],
)
def test_without_the_token_nothing_is_told(path: str, headers: dict[str, str]) -> None:
    """Not even whether a run exists."""
    answer = ask(path, headers=headers)
    assert answer.status_code == 401
    assert "job-1" not in answer.text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8650", "127.0.0.1:80", "", "a@b"])
def test_a_name_that_was_made_to_point_here_is_refused(host: str) -> None:
    """DNS rebinding: the browser takes the page for the attacker's own, and sends no cookie; but
    a token may have been found.
    """
    assert ask("/", headers={**KNOWN, "host": host}).status_code == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:3000", "sec-fetch-site": "same-site"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"},
    ],
)
def test_another_page_may_not_ask(headers: dict[str, str]) -> None:
    """A cookie is shared by all ports of a host, so that it proves nothing by itself."""
    cookie = {"cookie": f"spotguard-{PORT}={TOKEN}"}
    assert ask("/events", headers={**cookie, **headers}).status_code == 403
    act = {**ACT, **headers}
    assert ask("/runs/job-1/stop", method="POST", headers=act, content="{}").status_code == 403


def test_the_token_leaves_the_address_for_a_cookie() -> None:
    """It is in no history and no referrer; the cookie is none that scripts can read."""
    answer = ask(f"/runs/job-1?token={TOKEN}&x=1")
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs/job-1?x=1")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert ask("/?token=wrong").status_code == 401
    for path in ("//evil.example/", "/\\evil.example/"):
        answer = ask(f"{OWN}{path}?token={TOKEN}")
        assert answer.headers["location"].startswith("/")
        assert not answer.headers["location"].startswith(("//", "/\\"))


@pytest.mark.parametrize(
    "path",
    [
        "/runs/..%2f..%2fetc%2fpasswd",
        "/runs/../../etc/passwd",
        "/events/..%2fjob-1",
        "/runs/%00",
        "/runs/no-such-run",
        "/static/page.js",
        "/journal.db",
        "/runs/job-1/../../journal.db",
    ],
)
def test_a_path_leads_to_no_file(path: str) -> None:
    """Only runs that were seen can be named."""
    answer = ask(path, headers=KNOWN)
    assert answer.status_code == 404
    assert "root:" not in answer.text


def test_each_answer_has_the_policy() -> None:
    """Also those that refuse: what an error repeats must not run either."""
    for path, headers in (("/", KNOWN), ("/", {}), ("/nothing", KNOWN), ("/runs/<script>", KNOWN)):
        told = ask(path, headers=headers).headers
        assert "default-src 'none'" in told["content-security-policy"]
        assert "frame-ancestors 'none'" in told["content-security-policy"]
        assert told["x-content-type-options"] == "nosniff"
        assert told["cache-control"] == "no-store"
    refused = ask("/runs/<script>alert(1)</script>x", headers=KNOWN)
    assert refused.headers["content-type"].startswith("text/plain")


def test_stopping_needs_more_than_the_cookie(monkeypatch: pytest.MonkeyPatch) -> None:
    """A form of another page sends no header of ours, and no JSON."""
    asked: list[str] = []

    def stop(run_id: str) -> bool:
        asked.append(run_id)
        return True

    monkeypatch.setattr(api, "request_stop", stop)
    path, cookie = "/runs/job-1/stop", {"cookie": f"spotguard-{PORT}={TOKEN}"}
    form = {**cookie, "content-type": "application/x-www-form-urlencoded"}
    assert ask(path, method="POST", headers=form, content="a=b").status_code == 403
    plain = {**cookie, "x-spotguard": "1", "content-type": "text/plain"}
    assert ask(path, method="POST", headers=plain, content="{}").status_code == 400
    assert ask(path, headers=ACT).status_code == 405
    assert ask(path, method="POST", headers={"x-spotguard": "1"}).status_code == 401
    assert asked == []
    answer = ask(path, method="POST", headers={**ACT, **cookie}, content="{}")
    assert (answer.status_code, asked) == (202, ["job-1"])


def test_what_is_asked_for_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same rules as on the command line, in one sentence, and never half."""
    asked: list[Any] = []
    monkeypatch.setattr(api, "resume", lambda run_id, **limits: asked.append((run_id, limits)))
    path = "/runs/job-2/resume"
    for body in (
        '{"budget": "-3"}',
        '{"budget": 1e999}',
        '{"deadline": "soon"}',
        '{"nodes": 9}',
        "[]",
        "{",
        "[" * 4000,
        " " * 5000,
    ):
        answer = ask(path, method="POST", headers=ACT, content=body)
        assert answer.status_code == 400
        assert answer.json()["message"]
    assert asked == []
    body = '{"budget": "$20", "deadline": "2h"}'
    assert ask(path, method="POST", headers=ACT, content=body).status_code == 202
    assert asked == [("job-2", {"budget_usd": 20.0, "deadline_s": 7200.0})]
    assert ask("/runs/job-2/explode", method="POST", headers=ACT, content="{}").status_code == 404


def test_read_only_shows_and_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a button nor by a request."""
    monkeypatch.setattr(api, "request_stop", lambda run_id: pytest.fail("it was asked"))
    answer = ask("/runs/job-1/stop", method="POST", headers=ACT, content="{}", read_only=True)
    assert answer.status_code == 403
    assert '"actions"' not in ask("/runs/job-1", headers=KNOWN, read_only=True).text
    assert '"actions":["stop"]' in ask("/runs/job-1", headers=KNOWN).text


def test_a_token_file_is_private(tmp_path: Path) -> None:
    """It is made for its owner alone, kept, and refused where others may read it."""
    path = tmp_path / "token"
    made = token_in(path)
    assert token_in(path) == made
    assert path.stat().st_mode & 0o077 == 0
    path.chmod(0o644)
    with pytest.raises(UsageError, match="others may read"):
        token_in(path)
    path.chmod(0o600)
    for wrong in (b"short", b"", b"\xff" * 40, b"two words of some length here"):
        path.write_bytes(wrong)
        with pytest.raises(UsageError, match="holds no token"):
            token_in(path)
    with pytest.raises(EnvironmentFailure, match="cannot be used"):
        token_in(tmp_path)
    assert len(token_in(None)) >= 32
