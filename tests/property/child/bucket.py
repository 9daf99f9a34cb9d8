"""A bucket that all ranks of a machine share: a folder behind the requests of a remote store.

What the folder cannot do by itself is what clouds do: answer 503, be slow, lose an answer, be away.
So `RemoteStore`, with its retries, parts and words of the writer, is what the run is saved by.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, TypeVar

import spotguard.storage
from spotguard.errors import NotFound, StoreUnavailable
from spotguard.storage import FileStore
from spotguard.storage.remote.bucket import Page, PartRules, Precondition, Upload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from spotguard.storage.base import ObjectInfo
    from tests.property.child.blows import Blows

Result = TypeVar("Result")
_RULES = PartRules(min_bytes=1, max_bytes=1 << 30, max_parts=10_000)
_WRITERS, _PARTS = ".writers", ".parts"


class FolderBucket:
    """A `Bucket` whose objects lie in a folder as a `FileStore` has them."""

    def __init__(self, root: Path, blows: Blows) -> None:
        self.part_rules = _RULES
        self.heeds_conditions = True
        self._store = FileStore(root)
        self._aside = root.with_name(f"{root.name}-aside")
        self._blows = blows

    @property
    def url(self) -> str:
        """A name for messages."""
        return "s3://property"

    def put(
        self, key: str, body: Sequence[memoryview], *, condition: Precondition, writer: str
    ) -> str:
        """Store the views as one object; return its etag."""
        return self._call(lambda: self._put(key, b"".join(body), condition, writer), writes=True)

    def begin(self, key: str, *, writer: str) -> str:
        """Begin a write in parts; return its id."""
        upload_id = secrets.token_hex(8)
        folder = self._aside / _PARTS / upload_id

        def effect() -> str:
            folder.mkdir(parents=True)
            return upload_id

        return self._call(effect)

    def put_part(self, key: str, upload_id: str, number: int, body: Sequence[memoryview]) -> str:
        """Store one part; a torn one is there by half."""
        path = self._aside / _PARTS / upload_id / str(number)

        def effect() -> str:
            path.write_bytes(b"".join(body))
            return str(number)

        return self._call(effect, writes=True, torn=lambda: path.write_bytes(b"".join(body)[:9]))

    def finish(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[str],
        *,
        condition: Precondition,
        writer: str,
    ) -> str:
        """Make the parts the object; return its etag."""
        folder = self._aside / _PARTS / upload_id

        def effect() -> str:
            if not folder.exists():
                raise NotFound(f"there is no upload {upload_id}")
            whole = b"".join((folder / part).read_bytes() for part in parts)
            etag = self._put(key, whole, condition, writer)
            self.abort(key, upload_id)
            return etag

        return self._call(effect, writes=True)

    def abort(self, key: str, upload_id: str) -> None:
        """Give a write in parts up."""
        folder = self._aside / _PARTS / upload_id
        for path in list(folder.glob("*")):
            path.unlink()
        if folder.exists():
            folder.rmdir()

    def uploads(self, prefix: str) -> Sequence[Upload]:
        """Return none: nobody asks a bucket of a minute's life for old ones."""
        return []

    def get(self, key: str, max_bytes: int | None = None) -> bytes:
        """Return the whole object."""
        return self._call(lambda: self._store.get(key, max_bytes=max_bytes))

    def get_range(self, key: str, offset: int, into: Sequence[memoryview]) -> None:
        """Fill the views from byte `offset` on."""

        def effect() -> None:
            at = offset
            for view in into:
                self._store.get_into(key, at, view)
                at += len(view)

        self._call(effect)

    def head(self, key: str) -> ObjectInfo | None:
        """Return what a listing would say of `key`, or None."""
        return self._call(lambda: self._store.head(key))

    def writer_of(self, key: str) -> str | None:
        """Return who wrote `key`."""
        path = self._writer_path(key)
        return self._call(lambda: path.read_text() if path.exists() else None)

    def page(
        self, prefix: str, *, start_after: str = "", folders: bool = False, token: str | None = None
    ) -> Page:
        """Return the whole listing as one page."""

        def effect() -> Page:
            found = list(self._store.list(prefix, start_after=start_after))
            if not folders:
                return Page(found, [], None)
            return Page([], list(self._store.list_folders(prefix)), None)

        return self._call(effect)

    def delete(self, key: str) -> None:
        """Remove the object."""
        self._call(lambda: self._store.delete(key))

    def copy(self, source: str, target: str, *, condition: Precondition, writer: str) -> str:
        """Copy an object; return the new etag."""
        return self._call(lambda: self._put(target, self._store.get(source), condition, writer))

    def archive(self, key: str) -> None:
        """Do nothing: no run of the property test archives."""

    def _put(self, key: str, data: bytes, condition: Precondition, writer: str) -> str:
        etag = self._store.put(
            key, data, if_absent=condition.if_absent, if_match=condition.if_match
        )
        path = self._writer_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(writer)
        return etag

    def _writer_path(self, key: str) -> Path:
        return self._aside / _WRITERS / key.replace("/", "+")

    def _call(
        self,
        effect: Callable[[], Result],
        *,
        writes: bool = False,
        torn: Callable[[], Any] = lambda: None,
    ) -> Result:
        fault = self._blows.fault
        if fault.get("until", 0.0) > time.monotonic():
            raise StoreUnavailable("connection refused (scripted)")
        if fault.get("slows", 0) > 0:
            fault["slows"] -= 1
            time.sleep(fault["seconds"])
        if fault.get("fails", 0) > 0:
            fault["fails"] -= 1
            raise StoreUnavailable("503 Slow Down (scripted)")
        if writes and fault.get("tears", 0) > 0:
            fault["tears"] -= 1
            if fault["tears"] % 2:
                torn()
            else:
                effect()
            raise StoreUnavailable("the connection broke before the answer came (scripted)")
        return effect()


def use_buckets(blows: Blows, folder: Path) -> None:
    """Have every `s3://` store of this process be such a bucket, in the run's own folder."""
    root = folder / "spotguard-runs"

    def opened(scheme: str, url: str) -> FolderBucket:
        return FolderBucket(root, blows)

    spotguard.storage._open_bucket = opened
