"""Telling people: webhooks that hear when money runs short and when a run comes to rest.

What is to be told stands in the journal, and so does that it was told: a controller that dies in
between tells it again after its return, one that does not tells it once. A hook that fails is tried
a few times and then given up; nothing waits for it for long, and no run ends because of it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from spotguard.control.journal import cost
from spotguard.control.journal.record import Kind
from spotguard.shared.units import format_usd

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spotguard.control.journal.ledger import Ledger
    from spotguard.control.journal.record import RunRecord, Tiding
    from spotguard.shared.units import Clock

log = logging.getLogger(__name__)

_TIMEOUT_S = 3.0
_RETRY_S = 30.0
_TRIES = 4


class Notifier:
    """Tells each tiding to all hooks; one for a supervisor."""

    def __init__(
        self,
        urls: Sequence[str],
        ledger: Ledger,
        clock: Clock,
        *,
        post: Callable[[str, dict[str, Any]], str | None] | None = None,
    ) -> None:
        """`post(url, body)` returns what went wrong, or None; it must not raise."""
        self._urls = tuple(urls)
        self._ledger = ledger
        self._clock = clock
        self._post = post or post_json
        self._tries: dict[tuple[int, str], int] = {}
        self._next_at = float("-inf")

    def tell(self, *, last: bool = False) -> None:
        """Tell what was not told yet; blocks for some seconds at most. `last`: no later try."""
        untold = self._ledger.record.untold
        if not self._urls or not untold or (not last and self._clock.monotonic() < self._next_at):
            return
        for tiding in untold:
            body = body_of(self._ledger.record, tiding, self._clock.now())
            hopes = [self._try(tiding, url, body) for url in self._urls]
            if last or not any(hopes):
                self._ledger.write(Kind.TOLD, {"seq": tiding.seq})
            else:
                self._next_at = self._clock.monotonic() + _RETRY_S

    def _try(self, tiding: Tiding, url: str, body: dict[str, Any]) -> bool:
        """Tell one hook, unless it was told; return whether to try it again later."""
        tries = self._tries.get((tiding.seq, url), 0)
        if tries >= _TRIES:
            return False
        problem = self._post(url, body)
        if problem is None:
            self._tries[tiding.seq, url] = _TRIES
            return False
        self._tries[tiding.seq, url] = tries + 1
        # The path of a hook is its secret: only its host may be named.
        log.warning("%s could not be notified: %s", urlsplit(url).hostname, problem)
        return tries + 1 < _TRIES


def body_of(record: RunRecord, tiding: Tiding, now: float) -> dict[str, Any]:
    """Return what a hook is sent; `text` is what Slack, Mattermost and Teams show."""
    spent_usd = cost.spent_usd(record, now)
    of_budget = f" of {format_usd(record.limits.budget_usd)}" if record.limits.budget_usd else ""
    return {
        "text": f"spotguard: {record.run_id}: {tiding.text} (spent {format_usd(spent_usd)}"
        f"{of_budget})",
        "run_id": record.run_id,
        "name": record.name,
        "event": tiding.kind,
        "spent_usd": spent_usd,
        "budget_usd": record.limits.budget_usd,
        "id": f"{record.run_id}/{tiding.seq}",
    }


def post_json(url: str, body: dict[str, Any]) -> str | None:
    """Send `body` to `url`; return what went wrong, in words that do not hold the URL."""
    import requests

    try:
        answer = requests.post(url, json=body, timeout=_TIMEOUT_S, allow_redirects=False)
    except requests.RequestException as problem:
        return type(problem).__name__
    return None if answer.ok else f"HTTP {answer.status_code}"
