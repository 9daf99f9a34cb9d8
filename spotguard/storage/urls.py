"""Stores' URLs: what is below one."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, unquote, urlsplit

from spotguard.errors import UsageError
from spotguard.shared.paths import expanded

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PASSWORD = re.compile(r":[^:/@]*@")
_ALMOST_A_SCHEME = re.compile(
    r"(s3a?|r2|gcs?|gs|az|azure|abfss?|https?|file)(:/*|//+)(.*)", re.IGNORECASE | re.DOTALL
)
"""A bucket's scheme with a slash or the colon left out: `s3//bucket`, `gs:/bucket`, `s3:bucket`."""


def below(url: str, name: str) -> str:
    """Return the URL of the folder `name` in the store at `url`; its options stay at the end."""
    place, mark, options = url.partition("?")
    return f"{place.rstrip('/')}/{name.strip('/')}{mark}{options}"


def split_last(url: str) -> tuple[str, str]:
    """Return the URL of the store above a folder, and the folder's name: `below` undone."""
    place, mark, options = url.partition("?") if "://" in url else (url, "", "")
    above, _, name = place.rstrip("/").rpartition("/")
    return f"{above}{mark}{options}" if above else "", name


def is_url(text: str) -> bool:
    """Return whether the user wrote a URL; False for the path of a folder.

    Raises:
        UsageError: it is neither, but a URL with a slash or the colon left out. Taken for a path it
            would become a folder on this machine, and everything after it would seem to work.
    """
    if _SCHEME.match(text):
        return True
    if almost := _ALMOST_A_SCHEME.match(text.strip()):
        given, rest = (_without_secrets(part) for part in (text, almost[3]))
        raise UsageError(
            f"store {given!r} is neither a URL nor a plain path",
            hint=f"did you mean {almost[1].lower()}://{rest or '...'}? "
            "A folder of that name is written with ./ in front",
        )
    return False


def _without_secrets(url: str) -> str:
    """Return what messages may show of a URL: no password, and none of its options."""
    return _PASSWORD.sub(":...@", url.partition("?")[0])


def whole_url(text: str) -> str:
    """Return a URL as it is, and the absolute path of a folder; `UsageError` if it is neither."""
    return text if is_url(text) else str(expanded(text).resolve())


def taken_apart(url: str) -> SplitResult:
    """Return the parts of a store's URL; `UsageError` if it is none."""
    place = _without_secrets(url)
    try:
        return urlsplit(url)
    except ValueError:
        raise UsageError(
            f"store {place!r} is no URL", hint="is there a [ without its ], or one too many?"
        ) from None


def folder_at(url: str) -> str | None:
    """Return the path of the folder that a store's `file://` URL names; None for any other."""
    return unquote(url.removeprefix("file://")) if url.startswith("file://") else None


def is_server(url: str) -> bool:
    """Return whether it is the `http://` or `https://` URL of a server."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a [ without its ], or a port that is no number or too large
        return False


def is_folder(url: str) -> bool:
    """Return whether a store is a folder, or memory: whether asking it costs nothing."""
    return not url.startswith(("s3://", "gs://", "az://", "https://"))
