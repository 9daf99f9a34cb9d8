"""The dashboard's addresses: the list of runs, a page for each, what changes of them, metrics.

GET  /                  all runs
GET  /runs/ID           one run
GET  /events[/ID]       the same page again, as JSON, whenever it changes (server-sent events)
POST /runs/ID/stop      save, then release the nodes
POST /runs/ID/resume    go on; JSON with `budget` and `deadline`, both optional
GET  /metrics           for Prometheus, with the token as a bearer
"""

from __future__ import annotations

import contextlib
import json
import logging
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from spotguard.control import api
from spotguard.errors import SpecError, SpotguardError, UsageError
from spotguard.pages.dashboard.feed import MOST_READERS
from spotguard.pages.dashboard.guard import Guard
from spotguard.pages.html import live_html
from spotguard.pages.metrics import CONTENT_TYPE
from spotguard.spec.setting import duration, usd

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp

    from spotguard.pages.dashboard.feed import Feed

log = logging.getLogger(__name__)

_MOST_BODY = 4096


def dashboard(feed: Feed, *, token: str, port: int, read_only: bool = False) -> ASGIApp:
    """Return the application."""
    pages = _Pages(feed, read_only=read_only)
    routes = [
        Route("/", pages.runs),
        Route("/events", pages.events),
        Route("/events/{run_id}", pages.events),
        Route("/metrics", pages.metrics),
        Route("/runs/{run_id}", pages.run),
        Route("/runs/{run_id}/{action}", pages.act, methods=["POST"]),
    ]

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await feed.close()

    handlers: dict[Any, Any] = {SpotguardError: _told}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    return Guard(app, token=token, port=port)


class _Pages:
    """Answers requests that the guard let through."""

    def __init__(self, feed: Feed, *, read_only: bool) -> None:
        self._feed = feed
        self._read_only = read_only

    async def runs(self, _: Request) -> Response:
        return HTMLResponse(live_html(*await self._feed.page()))

    async def run(self, request: Request) -> Response:
        return HTMLResponse(live_html(*await self._feed.page(request.path_params["run_id"])))

    async def metrics(self, _: Request) -> Response:
        return Response(await self._feed.metrics(), media_type=CONTENT_TYPE)

    async def events(self, request: Request) -> Response:
        run_id = request.path_params.get("run_id", "")
        if self._feed.readers >= MOST_READERS:
            return PlainTextResponse("Too many pages are open.\n", 503)
        if run_id:
            await self._feed.is_ours(run_id)  # which says if there is no such run
        forms = self._feed.forms(run_id)
        return StreamingResponse(_as_events(forms), media_type="text/event-stream")

    async def act(self, request: Request) -> Response:
        """Stop or resume a run."""
        run_id, action = request.path_params["run_id"], request.path_params["action"]
        if action not in ("stop", "resume"):
            return JSONResponse({"message": "There is no such action."}, 404)
        if self._read_only:
            return JSONResponse({"message": "This dashboard only shows (--read-only)."}, 403)
        if not await self._feed.is_ours(run_id):
            return JSONResponse({"message": "Another machine controls this run."}, 403)
        wishes = _wishes(await _body(request))
        message = await run_in_threadpool(_carry_out, action, run_id, wishes)
        log.info("%s %s, asked for on the dashboard", action, run_id)
        return JSONResponse({"message": message}, 202)


def _carry_out(action: str, run_id: str, wishes: dict[str, float | None]) -> str:
    """Stop or resume a run; return what was done, in words. Blocks for seconds."""
    if action == "resume":
        api.resume(run_id, budget_usd=wishes.get("budget_usd"), deadline_s=wishes.get("deadline_s"))
        return "It goes on from its last save."
    if api.request_stop(run_id):
        return "It was asked to save and stop."
    raise UsageError("It has come to rest already.")


async def _body(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request; an absent one is empty."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise UsageError("What is asked for must be JSON.")
    raw = b""
    async for part in request.stream():
        raw += part
        if len(raw) > _MOST_BODY:
            raise UsageError("What is asked for is too long.")
    try:
        body = json.loads(raw or b"{}")
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise UsageError("What is asked for must be a JSON object.")
    return body


def _wishes(body: dict[str, Any]) -> dict[str, float | None]:
    readers: dict[str, tuple[str, Callable[[Any], float]]] = {
        "budget": ("budget_usd", usd),
        "deadline": ("deadline_s", duration),
    }
    wishes: dict[str, float | None] = {}
    for name, raw in body.items():
        if name not in readers:
            raise UsageError(f"There is no {name!r} to ask for.")
        field, read = readers[name]
        try:
            wishes[field] = read(raw)
        except ValueError:
            sum_of_usd = "an amount of USD above 0, decimals after a point"
            allowed = sum_of_usd if name == "budget" else "a duration such as 12h"
            raise SpecError(name, f"given {raw!r}; allowed: {allowed}") from None
    return wishes


async def _as_events(forms: AsyncIterator[tuple[str, str]]) -> AsyncIterator[str]:
    async for event, form in forms:
        said = json.dumps(form) if event == "trouble" else form
        yield f"event: {event}\ndata: {said}\n\n" if event else ": still here\n\n"


async def _told(request: Request, problem: Exception) -> Response:
    """Return what an expected error says."""
    assert isinstance(problem, SpotguardError)
    words = f"{problem.message} {problem.hint}".strip()
    code = 404 if request.method == "GET" and isinstance(problem, UsageError) else 400
    if request.method == "POST":
        return JSONResponse({"message": words}, code)
    return PlainTextResponse(words + "\n", code)
