"""What open pages are sent: each is made once however many look at it, and only while one does.

One thread reads journals; the event loop never waits for a disk. Who looks at a page gets its
newest form and no backlog: a slow reader misses some in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from spotguard.errors import SpotguardError
from spotguard.pages.html import as_json, live_html
from spotguard.pages.run_page import run_page
from spotguard.pages.runs_page import runs_page

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from spotguard.control.report.fleet import Fleet
    from spotguard.control.report.follow import RunFollower
    from spotguard.pages.layout import WebPage

log = logging.getLogger(__name__)

POLL_S = 1.0
MOST_READERS = 256
_SILENCE_S = 15.0
"""After this a comment is sent, so that a connection that broke is noticed."""
_MOST_FOLLOWED = 16
"""Runs that are remembered once nobody looks at them any more."""

_T = TypeVar("_T")


class Feed:
    """Makes pages, and sends them again when they change. Of one event loop."""

    def __init__(self, fleet: Fleet, *, read_only: bool, poll_s: float = POLL_S) -> None:
        self._fleet = fleet
        self._read_only = read_only
        self._poll_s = poll_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spotguard-pages")
        self._followers: dict[str, RunFollower] = {}
        self._pages: dict[str, tuple[WebPage, str]] = {}
        """Newest form of each page that was made, and its JSON; the list of runs is `""`."""
        self._pages_made_at: dict[str, float] = {}
        self._problems: dict[str, str] = {}
        """Why a page that is looked at cannot be made now."""
        self._looked_at: dict[str, int] = {}
        """How many look at a page now."""
        self._made_at = float("-inf")
        self._news = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = False

    @property
    def readers(self) -> int:
        """How many look at a page now."""
        return sum(self._looked_at.values())

    def prepare(self) -> None:
        """Make the list of runs once, before anybody asks: no visitor waits for what that loads."""
        live_html(*self._renewed(""))

    async def page(self, run_id: str = "") -> tuple[WebPage, str]:
        """Return a page as it is now, and its JSON; `UsageError` if there is no such run."""
        return await self._off_loop(lambda: self._renewed(run_id))

    async def metrics(self) -> bytes:
        """Return what Prometheus reads."""
        from spotguard.pages.metrics import exposition

        def make() -> bytes:
            self._refresh()
            return exposition(self._fleet.measures())

        return await self._off_loop(make)

    async def is_ours(self, run_id: str) -> bool:
        """Return whether this machine may stop the run; `UsageError` if there is no such run."""
        return await self._off_loop(lambda: self._fleet.is_ours(run_id))

    async def forms(self, run_id: str = "") -> AsyncIterator[tuple[str, str]]:
        """Yield `page` and its JSON now and each time it changes; two empty texts for no news.

        While it cannot be made, `trouble` and why, once.
        """
        self._looked_at[run_id] = self._looked_at.get(run_id, 0) + 1
        if self._task is None:
            self._loop = asyncio.get_running_loop()
            self._task = self._loop.create_task(self._watch())
        sent = None
        try:
            await self._try(run_id)
            while not self._ended:
                newest = self._newest(run_id)
                if newest != sent:
                    sent = newest
                    yield newest
                    continue
                try:
                    async with self._news:
                        await asyncio.wait_for(self._news.wait(), _SILENCE_S)
                except (TimeoutError, asyncio.TimeoutError):
                    yield "", ""
        finally:
            self._looked_at[run_id] -= 1

    def _newest(self, run_id: str) -> tuple[str, str]:
        """Return what is to be said of a page now."""
        if problem := self._problems.get(run_id):
            return "trouble", problem
        return "page", self._pages.get(run_id, (None, ""))[1]

    def end(self) -> None:
        """Have all `forms` come to their end; a signal handler may call it."""
        self._ended = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._task = asyncio.ensure_future(self._tell_all())

    async def _tell_all(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def close(self) -> None:
        """End the thread and all that is under way."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _watch(self) -> None:
        """Renew what is looked at, every second."""
        while not self._ended:
            await asyncio.sleep(self._poll_s)
            wanted = [run_id for run_id, count in self._looked_at.items() if count > 0]
            for run_id in wanted:
                await self._try(run_id)
            await self._tell_all()

    async def _try(self, run_id: str) -> None:
        """Renew a page; one that cannot be made takes no other with it, and is tried again."""
        try:
            await self.page(run_id)
        except SpotguardError as problem:
            words = problem.message
            if self._problems.get(run_id) != words:
                log.warning("%s cannot be shown now: %s", run_id or "the list of runs", words)
            self._problems[run_id] = words
        else:
            self._problems.pop(run_id, None)

    async def _off_loop(self, act: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, act)

    # ------------------------------------------------------------ in the thread

    def _renewed(self, run_id: str) -> tuple[WebPage, str]:
        """Make a page anew, unless that was done a moment ago for somebody else."""
        made_at, made = self._pages_made_at.get(run_id, float("-inf")), self._pages.get(run_id)
        if made is not None and time.monotonic() - made_at < self._poll_s / 2:
            return made
        self._refresh()
        page = self._run(run_id) if run_id else runs_page(self._fleet.summaries())
        made = self._pages[run_id] = (page, as_json(page))
        self._pages_made_at[run_id] = time.monotonic()
        return made

    def _refresh(self) -> None:
        """Look at all runs, unless that was done a moment ago for somebody else."""
        if time.monotonic() - self._made_at >= self._poll_s / 2:
            self._fleet.refresh()
            self._made_at = time.monotonic()

    def _run(self, run_id: str) -> WebPage:
        may_act = self._fleet.is_ours(run_id) and not self._read_only
        follower = self._followers.pop(run_id, None) or self._fleet.follower(run_id)
        self._followers[run_id] = follower
        self._forget()
        try:
            return run_page(follower.look(), live=True, may_act=may_act)
        except SpotguardError:
            self._followers.pop(run_id, None)
            raise

    def _forget(self) -> None:
        """Keep what is looked at, and of the others the newest."""
        idle = [run_id for run_id in self._followers if not self._looked_at.get(run_id)]
        for run_id in idle[:-_MOST_FOLLOWED]:
            self._followers.pop(run_id, None)
            self._pages.pop(run_id, None)
            self._pages_made_at.pop(run_id, None)
