"""The run store: one protocol, one file per backend, and `open_store` to get one by its URL."""

from __future__ import annotations

import difflib
import os
from typing import TYPE_CHECKING
from urllib.parse import unquote

from spotguard.errors import UsageError
from spotguard.storage.filesystem.store import FileStore
from spotguard.storage.prefixed import PrefixedStore
from spotguard.storage.urls import is_url, taken_apart

if TYPE_CHECKING:
    from spotguard.storage.base import ObjectStore
    from spotguard.storage.credentials import Identity
    from spotguard.storage.remote.bucket import Bucket

__all__ = [
    "check_conditions",
    "FileStore",
    "open_existing",
    "open_store",
    "PrefixedStore",
    "who_am_i",
]

_SCHEMES = ("file", "s3", "gs", "az")
_OTHER_NAMES = {"gcs": "gs", "azure": "az", "abfs": "az", "abfss": "az", "r2": "s3", "s3a": "s3"}


def open_store(url: str | os.PathLike[str]) -> ObjectStore:
    """Return the store at `url`: a folder's path, `file://`, `s3://`, `gs://` or `az://` URL.

    Nothing is touched yet.

    Raises:
        UsageError: it names no store.
        MissingExtra: the package for this kind of bucket is not installed.
    """
    text = os.fspath(url)
    if not is_url(text):
        return FileStore(_checked_path(text, text))
    scheme = text.partition("://")[0].lower()
    if scheme == "file":
        return FileStore(_path_of_file_url(text))
    from spotguard.storage.remote.store import RemoteStore  # with tenacity: not for every job

    return RemoteStore(_open_bucket(scheme, text))


def open_existing(url: str | os.PathLike[str]) -> ObjectStore:
    """Return the store at `url` for reading what others wrote there.

    A bucket that does not exist says so itself when it is read. A folder store makes its folder
    at the first write, so to a reader a mistyped path would look like a store without runs.

    Raises:
        UsageError: `url` names no store, or a folder that does not exist.
        MissingExtra: the package for this kind of bucket is not installed.
    """
    store = open_store(url)
    if isinstance(store, FileStore) and not store.folder_exists():
        raise UsageError(
            f"store {os.fspath(url)!r}: there is no such folder",
            hint="it is made when the first run is kept in it; is the path right?",
        )
    return store


def check_conditions(url: str) -> None:
    """Find out whether the store at `url` decides which of two racing writers is first.

    Raises:
        StoreError: its server ignores conditions, or its folder has no hard links, so no run can
            be written there.
    """
    from spotguard.storage.remote.store import RemoteStore

    store = open_store(url)
    if isinstance(store, (FileStore, RemoteStore)):
        store.check_conditions()


def _open_bucket(scheme: str, url: str) -> Bucket:
    """Import one vendor's file: a run needs one, and each brings a large package."""
    if scheme == "s3":
        from spotguard.storage.s3.bucket import S3Bucket

        return S3Bucket(url)
    if scheme == "gs":
        from spotguard.storage.gcs.bucket import open_gcs

        return open_gcs(url)
    if scheme == "az":
        from spotguard.storage.azure.bucket import open_azure

        return open_azure(url)
    raise _unknown(scheme)


def who_am_i(url: str) -> Identity | None:
    """Return the credentials that the store at `url` would be used with; None needs none.

    Raises:
        StoreError: there are none, or they cannot be used; the hint says how to get some.
        UsageError: the URL or the environment makes no sense.
        MissingExtra: the vendor's package is not installed.
    """
    scheme = url.partition("://")[0].lower()
    if scheme == "s3":
        from spotguard.storage.s3.credentials import s3_identity

        return s3_identity(url)
    if scheme == "gs":
        from spotguard.storage.gcs.credentials import gcs_identity

        return gcs_identity(url)
    if scheme == "az":
        from spotguard.storage.azure.credentials import azure_identity

        return azure_identity(url)
    return None


def _path_of_file_url(url: str) -> str:
    parts = taken_apart(url)
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


def _unknown(scheme: str) -> UsageError:
    close = difflib.get_close_matches(_OTHER_NAMES.get(scheme, scheme), _SCHEMES, n=1, cutoff=0.4)
    return UsageError(
        f"store: unknown scheme {scheme}://, allowed are a path, file://, s3://, gs:// and az://",
        hint=f"did you mean {close[0]}://?" if close else "give a path or one of these URLs",
    )
