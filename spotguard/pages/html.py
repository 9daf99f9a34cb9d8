"""Pages as HTML: one shell, with its script, its style and its first picture inside.

The picture is JSON in an element that no browser runs. The policy names the hashes of the two
scripts and of the style, so that nothing else runs whatever text is shown; a report may load
nothing at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from dataclasses import fields, is_dataclass
from functools import cache
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from spotguard.events.masking import masked

if TYPE_CHECKING:
    from spotguard.pages.layout import WebPage

_SHELL: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<div id="page"><noscript>This page needs JavaScript; spotguard status tells the same.</noscript>
</div>
<script type="application/json" id="data">{data}</script>
<script>{plot}</script>
<script>{script}</script>
</body>
</html>
"""


def report_html(page: WebPage) -> str:
    """Return a whole report in one file, which opens without a network."""
    return _html(page, as_json(page), policy=policy(connects=False))


def live_html(page: WebPage, data: str | None = None) -> str:
    """Return a page of the dashboard, which keeps asking its own server.

    `data` is what `as_json` makes of it, for who has that already.
    """
    return _html(page, as_json(page) if data is None else data, policy=policy(connects=True))


@cache
def policy(*, connects: bool) -> str:
    """Return the content security policy of a page."""
    hashes = [_hash_of(static(name)) for name in ("uplot.min.js", "page.js")]
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(hashes)}",
            f"style-src {_hash_of(_style())}",
            "img-src data:",
            f"connect-src {chr(39)}self{chr(39)}" if connects else "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def as_json(page: WebPage) -> str:
    """Return a page as JSON, on one line. What is not finite, and what is left at its default, is
    left out: the script knows the defaults.
    """
    return json.dumps(masked(_plain(page)), separators=(",", ":"), allow_nan=False)


def _html(page: WebPage, data: str, *, policy: str) -> str:
    # "</script" would end the element, "<!--" would change how it is read: no "<" is left in it.
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028")
    return _SHELL.format(
        policy=escape(policy),
        title=escape(f"{page.title} · spotguard"),
        style=_style(),
        data=data,
        plot=static("uplot.min.js"),
        script=static("page.js"),
    )


@cache
def static(name: str) -> str:
    """Return a file of the pages."""
    return (
        resources.files("spotguard.pages")
        .joinpath("static")
        .joinpath(name)
        .read_text("utf-8")
        .strip()
    )


@cache
def _style() -> str:
    return static("uplot.min.css") + "\n" + static("page.css")


@cache
def _hash_of(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind is str or value is None:  # nearly all there is
        return value
    if kind is float:
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if is_dataclass(kind):
        told = ((name, getattr(value, name), default) for name, default in _defaults(kind))
        return {name: _plain(item) for name, item, default in told if item != default}
    return value


@cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    """Return the name and the default of each field of a part."""
    return tuple((each.name, each.default) for each in fields(kind))
