"""A store below a prefix of another one: a run's own part of a bucket."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from spotguard.storage.keys import check_folder
from spotguard.storage.urls import below

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from spotguard.storage.base import Content, ObjectInfo, ObjectStore, Reads, Target


class PrefixedStore:
    """All keys of `store` that start with `prefix`, seen without it."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = check_folder(prefix.rstrip("/") + "/")

    @property
    def url(self) -> str:
        """Where this part of the store is, in the form `open_store` takes."""
        return below(self._store.url, self._prefix)

    def best_reads(self, key: str) -> Reads:
        """Return what the whole store says."""
        return self._store.best_reads(self._prefix + key)

    def put(
        self,
        key: str,
        data: Content,
        *,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> str:
        """Store `data` below the prefix; return its etag."""
        return self._store.put(self._prefix + key, data, if_absent=if_absent, if_match=if_match)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Return the whole object; `NotFound` if there is none."""
        return self._store.get(self._prefix + key, max_bytes=max_bytes)

    def get_into(self, key: str, offset: int, into: Target) -> None:
        """Fill `into` with the object's bytes from `offset`."""
        self._store.get_into(self._prefix + key, offset, into)

    def head(self, key: str) -> ObjectInfo | None:
        """Return what a listing would say of `key`, or None."""
        info = self._store.head(self._prefix + key)
        return info and self._without_prefix(info)

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects below the prefix, sorted, their keys relative to it."""
        after = self._prefix + start_after if start_after else ""
        for info in self._store.list(self._prefix + prefix, start_after=after):
            yield self._without_prefix(info)

    def list_folders(self, prefix: str) -> Sequence[str]:
        """Return, sorted, the prefixes one level below `prefix`."""
        folders = self._store.list_folders(self._prefix + check_folder(prefix))
        return [folder.removeprefix(self._prefix) for folder in folders]

    def delete(self, key: str) -> None:
        """Remove the object; nothing happens if there is none."""
        self._store.delete(self._prefix + key)

    def copy(self, source: str, target: str, *, if_absent: bool = False) -> str:
        """Make `target` an object with the bytes of `source`; return its etag."""
        return self._store.copy(self._prefix + source, self._prefix + target, if_absent=if_absent)

    def archive(self, key: str) -> None:
        """Move the object to where keeping it is cheap."""
        self._store.archive(self._prefix + key)

    def warm(self) -> None:
        """Do beforehand what makes the first use slow."""
        self._store.warm()

    def clean_up(self, prefix: str = "", *, older_than_s: float) -> int:
        """Free what writes below the prefix left that broke off so long ago."""
        return self._store.clean_up(self._prefix + prefix, older_than_s=older_than_s)

    def _without_prefix(self, info: ObjectInfo) -> ObjectInfo:
        return replace(info, key=info.key.removeprefix(self._prefix))
