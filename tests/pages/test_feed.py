"""What open pages hear while one of them cannot be made: the others go on."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from spotguard.control import api
from spotguard.pages.dashboard.feed import Feed
from tests.control.run_folders import make_run

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

_LONG_S = 60.0
"""Nothing takes so long: what is waited for comes in milliseconds, or never."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with two runs, which nothing controls."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    make_run(tmp_path / "home", "job-1")
    make_run(tmp_path / "home", "job-2")
    return tmp_path / "home"


async def _said(forms: AsyncIterator[tuple[str, str]]) -> tuple[str, str]:
    """Return the next that a page is told, when it is told something."""
    while True:
        event, form = await asyncio.wait_for(forms.__anext__(), _LONG_S)
        if event:
            return event, form


def test_a_run_that_cannot_be_read_freezes_no_other_page(home: Path) -> None:
    """Its own page is told why, and goes on once the run can be read again."""
    journal = home / "runs" / "job-1" / "journal.db"
    whole = journal.read_bytes()

    async def go() -> None:
        fleet = api.fleet()
        fleet.refresh()
        feed = Feed(fleet, read_only=True, poll_s=0.01)
        bad, good = feed.forms("job-1"), feed.forms("job-2")
        assert [(await _said(each))[0] for each in (bad, good)] == ["page", "page"]
        journal.write_bytes(b"damaged" * 200)
        words = await _told(bad, "trouble")
        assert str(journal) in words
        event, form = await _said(good)
        assert event == "page"
        assert json.loads(form)["run_id"] == "job-2"
        journal.write_bytes(whole)
        assert await _told(bad, "page")
        await feed.close()

    asyncio.run(go())


async def _told(forms: AsyncIterator[tuple[str, str]], event: str) -> str:
    """Return what is said with the next such event: a page may be renewed, or fail, before it."""
    while (said := await _said(forms))[0] != event:
        pass
    return said[1]
