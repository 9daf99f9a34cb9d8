"""The run store: one protocol, one file per backend, and `open_store` to get one by its URL."""

from __future__ import annotations

import difflib
import os
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from spotguard.errors import UsageError
from spotguard.storage.file import FileStore
from spotguard.storage.prefixed import PrefixedStore

if TYPE_CHECKING:
    from spotguard.storage.base import ObjectStore

__all__ = ["FileStore", "open_store", "PrefixedStore"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_BUCKETS = {"s3": "S3", "gs": "Google Cloud Storage", "az": "Azure Blob Storage"}


def open_store(url: str | os.PathLike[str]) -> ObjectStore:
    """Return the store at `url`: a folder's path or `file://` URL. Nothing is touched yet.

    Raises:
        UsageError: it names no store that this version can open.
    """
    text = os.fspath(url)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return FileStore(_checked_path(text, text))
    if scheme[1].lower() == "file":
        return FileStore(_path_of_file_url(text))
    raise _unsupported(scheme[1])


def _path_of_file_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise UsageError(
            f"store {url!r} names the host {parts.netloc!r}, but file:// is for this machine",
            hint=f"did you mean file:///{parts.netloc}{parts.path} (three slashes)?",
        )
    # '?' and '#' are legal in file names, so they belong to the path here.
    return _checked_path(unquote(url.split("://", 1)[1].removeprefix("localhost")), url)


def _checked_path(path: str, given: str) -> str:
    if not path.strip():
        raise UsageError(f"store {given!r} names no folder", hint="give a path, e.g. ./runs")
    if "\0" in path:
        raise UsageError(f"store {given!r} holds a NUL character")
    return path


def _unsupported(scheme: str) -> UsageError:
    known = _BUCKETS.get(scheme.lower())
    if known:
        return UsageError(
            f"store: {scheme}:// ({known}) is not supported, this version stores in folders only",
            hint="give a path or file:// URL; a mounted or shared folder works on several machines",
        )
    close = difflib.get_close_matches(scheme.lower(), ["file", *_BUCKETS], n=1, cutoff=0.4)
    guess = f"did you mean {close[0]}://?" if close else "give a path or a file:// URL"
    return UsageError(
        f"store: unknown scheme {scheme}://, allowed are a path and file://", hint=guess
    )
