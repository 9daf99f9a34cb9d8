"""Telling people: webhooks, and what apprise knows (Slack, e-mail, ntfy, PagerDuty and others).

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
from spotguard.errors import MissingExtra, SpecError
from spotguard.events.masking import masked
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
        self._post = post or post_to
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
        log.warning("%s could not be notified: %s", public_name(url), problem)
        return tries + 1 < _TRIES


def body_of(record: RunRecord, tiding: Tiding, now: float) -> dict[str, Any]:
    """Return what a hook is sent; `text` is what Slack, Mattermost and Teams show."""
    spent_usd = cost.spent_usd(record, now)
    of_budget = f" of {format_usd(record.limits.budget_usd)}" if record.limits.budget_usd else ""
    played = ", demo prices" if cost.demo_prices(record) else ""
    body = {
        "text": f"spotguard: {record.run_id}: {tiding.text} (spent {format_usd(spent_usd)}"
        f"{of_budget}{played})",
        "run_id": record.run_id,
        "name": record.name,
        "event": tiding.kind,
        "spent_usd": spent_usd,
        "budget_usd": record.limits.budget_usd,
        "demo_prices": cost.demo_prices(record),
        "id": f"{record.run_id}/{tiding.seq}",
    }
    return dict(masked(body))


def is_webhook(url: str) -> bool:
    """Return whether a URL gets our own JSON; apprise knows what to do with any other."""
    return url.partition("://")[0] in ("http", "https")


def public_name(url: str) -> str:
    """Return what may be said of a URL: of a webhook its host, of any other its scheme alone.

    The path of a hook is its secret; in apprise's URLs even the host may be one.
    """
    return (urlsplit(url).hostname or "?") if is_webhook(url) else url.partition("://")[0]


def check_urls(urls: Sequence[str]) -> None:
    """Raise unless all URLs can be told.

    Raises:
        MissingExtra: one is apprise's, which is not installed.
        SpecError: apprise makes no sense of one; only its scheme is named.
    """
    for url in urls:
        if not is_webhook(url) and not _apprise().Apprise().add(url):
            raise SpecError(
                "notify",
                f"apprise makes no sense of a URL that begins with {public_name(url)}://",
                hint="its forms: https://github.com/caronc/apprise/wiki",
            )


def post_to(url: str, body: dict[str, Any]) -> str | None:
    """Tell one URL; return what went wrong, in words that do not hold it. Blocks for seconds."""
    return post_json(url, body) if is_webhook(url) else _tell_by_apprise(url, body)


def _tell_by_apprise(url: str, body: dict[str, Any]) -> str | None:
    try:
        apprise = _apprise()
    except MissingExtra as problem:
        return problem.message
    told = apprise.Apprise()
    if not told.add(url):
        return "apprise makes no sense of it"
    done = told.notify(title=f"spotguard: {body['name']}", body=str(body["text"]))
    return None if done else "it was not taken"


def _apprise() -> Any:
    try:
        import apprise
    except ImportError as problem:
        raise MissingExtra(
            "telling such a URL needs the package apprise",
            hint="pip install 'spotguard[alerts]'",
        ) from problem
    # What it logs can hold parts of a URL; what went wrong is told by us.
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)
    return apprise


def post_json(url: str, body: dict[str, Any]) -> str | None:
    """Send `body` to `url`; return what went wrong, in words that do not hold the URL."""
    import requests

    try:
        answer = requests.post(url, json=body, timeout=_TIMEOUT_S, allow_redirects=False)
    except requests.RequestException as problem:
        return type(problem).__name__
    return None if answer.ok else f"HTTP {answer.status_code}"
