"""Azure Blob Storage as a bucket, by the vendor's client.

Every block and blob is sent with its MD5, which the service proves. The client moves the bytes a
piece at a time between the caller's memory and the socket: it sends what can be gone through, and
shows a download's answer to a hook before it would gather it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
from base64 import b64encode
from typing import TYPE_CHECKING, Any

from spotguard.errors import NotFound, StoreError, StoreUnavailable, TooLarge
from spotguard.storage.azure.access import connect, find_place, need_packages
from spotguard.storage.azure.errors import problem_of
from spotguard.storage.base import ObjectInfo
from spotguard.storage.buffers import within
from spotguard.storage.deadline import timeout_s
from spotguard.storage.http.connections import CONNECT_S, SILENCE_S
from spotguard.storage.http.sdk_bodies import Incoming, Outgoing, PerProcess, be_quiet
from spotguard.storage.remote.bucket import ALWAYS, Page, PartRules

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from azure.core.credentials import TokenCredential
    from azure.storage.blob import BlobClient, BlobProperties, ContainerClient

    from spotguard.storage.azure.access import AzurePlace
    from spotguard.storage.remote.bucket import Precondition, Upload

_MB = 1 << 20
_LARGEST_BLOCK_BYTES = 4000 * _MB
_PIECE_BYTES = 256 << 10
_WRITER = "spotguard_writer"
_PAGE_KEYS = 1000


def open_azure(url: str) -> AzureBucket:
    """Return the bucket that `url` names, see `access.find_place`; asks no server."""
    place = find_place(url)
    need_packages(place)
    return AzureBucket(place)


class AzureBucket:
    """A prefix in a container. Conditions are kept by the service."""

    part_rules = PartRules(min_bytes=1, max_bytes=_LARGEST_BLOCK_BYTES, max_parts=50_000)
    heeds_conditions = True

    def __init__(self, place: AzurePlace, login: TokenCredential | None = None) -> None:
        self._place = place
        self._container = PerProcess(lambda: _connected(place, login))
        scope = os.environ.get("SPOTGUARD_AZURE_ENCRYPTION_SCOPE", "").strip()
        self._encrypted: dict[str, Any] = {"encryption_scope": scope} if scope else {}

    def __repr__(self) -> str:
        return f"AzureBucket({self.url!r})"

    @property
    def url(self) -> str:
        """The place with its account; holds no secret."""
        return self._place.url

    def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        client = self._container.pop()
        if client:
            client.close()

    # ------------------------------------------------------------ writing

    def put(
        self, key: str, body: Sequence[memoryview], *, condition: Precondition, writer: str
    ) -> str:
        """Store the views as one blob, joined: only small objects are not put in blocks."""
        with self._asking(key, condition) as options:
            said = self._blob(key).upload_blob(
                b"".join(body),
                metadata={_WRITER: writer},
                overwrite=True,
                validate_content=True,
                **self._encrypted,
                **options,
            )
        return _bare(said["etag"])

    def begin(self, key: str, *, writer: str) -> str:
        """Return an id for a write in blocks; the service need not be told."""
        return secrets.token_hex(16)

    def put_part(self, key: str, upload_id: str, number: int, body: Sequence[memoryview]) -> str:
        """Store one block; return its id."""
        # Ids of all blocks of a blob must be of one length; those of other writers differ.
        block = f"{upload_id}{number:06}"
        outgoing: Any = Outgoing(body)
        # The client's own `validate_content` takes bytes alone.
        proof = {"Content-MD5": b64encode(_md5_of(body)).decode()}
        with self._asking(key) as options:
            self._blob(key).stage_block(
                block, outgoing, len(outgoing), headers=proof, **self._encrypted, **options
            )
        return block

    def finish(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[str],
        *,
        condition: Precondition,
        writer: str,
    ) -> str:
        """Make the blocks the blob; return its etag.

        Blocks of other writers of the same key are dropped: theirs will be told `NotFound`.
        While the blob consists of these very blocks, the same may be asked again.
        """
        from azure.storage.blob import BlobBlock

        with self._asking(key, condition) as options:
            said = self._blob(key).commit_block_list(
                [BlobBlock(part) for part in parts],
                metadata={_WRITER: writer},
                validate_content=True,
                **self._encrypted,
                **options,
            )
        return _bare(said["etag"])

    def copy(self, source: str, target: str, *, condition: Precondition, writer: str) -> str:
        """Copy a blob within the account; return the new etag."""
        with self._asking(target, condition) as options:
            origin = self._blob(source).url  # with the SAS, if that is what we have
            said = self._blob(target).start_copy_from_url(
                origin, metadata={_WRITER: writer}, **options
            )
        if said["copy_status"] != "success":
            # Within one account the service copies by reference, at once; it may be busy.
            raise StoreUnavailable(f"{self._named(target)} is still being copied")
        return _bare(said["etag"])

    def abort(self, key: str, upload_id: str) -> None:
        """Do nothing: the service drops blocks that belong to no blob after a week.

        The only ways to drop them at once would show an empty blob of this name for a moment.
        """

    def uploads(self, prefix: str) -> Sequence[Upload]:
        """Return nothing: there is nothing to do about blocks that belong to no blob."""
        return ()

    def delete(self, key: str) -> None:
        """Remove the blob; nothing happens if there is none."""
        with contextlib.suppress(NotFound), self._asking(key) as options:
            self._blob(key).delete_blob(delete_snapshots="include", **options)

    def archive(self, key: str) -> None:
        """Move the blob to the archive tier."""
        with self._asking(key) as options:
            self._blob(key).set_standard_blob_tier("Archive", **options)

    # ------------------------------------------------------------ reading

    def get(self, key: str, max_bytes: int | None = None) -> bytes:
        """Return the whole blob, proven by its MD5 if it was stored by one request."""

        def look(answer: Any) -> None:  # before its body is read
            headers = answer.http_response.headers
            whole = headers.get("Content-Range", "").rpartition("/")[2]
            try:
                within(key, max_bytes, b"", int(whole) if whole.isdigit() else None)
            except TooLarge:  # the connection ends here: nobody reads what is under way
                answer.http_response.internal_response.close()
                raise

        with self._asking(key) as options:
            answer = self._blob(key).download_blob(raw_response_hook=look, **options)
            content: bytes = answer.readall()
        promised = answer.properties.content_settings.content_md5
        if promised and bytes(promised) != _md5_of([memoryview(content)]):
            raise StoreUnavailable(f"{self._named(key)} arrived damaged")
        return content

    def get_range(self, key: str, offset: int, into: Sequence[memoryview]) -> None:
        """Fill the views from byte `offset` on."""
        incoming = Incoming(into)
        size_bytes = incoming.missing_bytes
        if not size_bytes:
            return

        def take(answer: Any) -> None:
            if answer.http_response.status_code == 206:
                for content in answer.http_response.stream_download(None, decompress=False):
                    incoming.write(content)
                # To gather the rest, the client makes a list as long as it takes this to be.
                answer.http_response.headers["Content-Length"] = "0"

        with self._asking(key) as options:
            answer = self._blob(key).download_blob(
                offset, size_bytes, raw_response_hook=take, decompress=False, **options
            )
        if answer.size < size_bytes:
            raise StoreError(f"{self._named(key)} ends before byte {offset + size_bytes}")
        if incoming.missing_bytes:
            raise StoreUnavailable(f"the connection broke while {self._named(key)} was read")

    def head(self, key: str) -> ObjectInfo | None:
        """Return what a listing would say of `key`, or None."""
        found = self._properties(key)
        return self._info(found) if found else None

    def writer_of(self, key: str) -> str | None:
        """Return who wrote `key`."""
        found = self._properties(key)
        return (found.metadata or {}).get(_WRITER) if found else None

    def page(
        self, prefix: str, *, start_after: str = "", folders: bool = False, token: str | None = None
    ) -> Page:
        """Return a page of the matching blobs, from the first one on: there is no other way."""
        from azure.storage.blob import BlobPrefix

        with self._asking(prefix) as options:
            container = self._container()
            ask = container.walk_blobs if folders else container.list_blobs
            found = ask(
                self._place.prefix + prefix,
                include=["metadata"],
                results_per_page=_PAGE_KEYS,
                **options,
            )
            pages: Any = found.by_page(token)
            entries = list(next(pages))
        return Page(
            [self._info(each) for each in entries if _is_object(each)],
            [self._key(each.name) for each in entries if isinstance(each, BlobPrefix)],
            pages.continuation_token or None,
        )

    def _info(self, found: BlobProperties) -> ObjectInfo:
        modified = found.last_modified
        modified_at = modified.timestamp() if modified else None
        archived = found.blob_tier == "Archive"
        return ObjectInfo(
            self._key(found.name),
            found.size,
            _bare(found.etag),
            modified_at,
            archived=archived,
            readable=not archived,
        )

    def _key(self, name: str) -> str:
        return name[len(self._place.prefix) :]

    def _properties(self, key: str) -> BlobProperties | None:
        with contextlib.suppress(NotFound), self._asking(key) as options:
            return self._blob(key).get_blob_properties(**options)
        return None

    # ------------------------------------------------------------ asking

    @contextlib.contextmanager
    def _asking(self, key: str, condition: Precondition = ALWAYS) -> Iterator[dict[str, Any]]:
        """Give the options of a request: time limits, condition; errors inside become ours."""
        from azure.core.exceptions import AzureError

        options = {
            "connection_timeout": timeout_s(CONNECT_S),
            "read_timeout": timeout_s(SILENCE_S),
            **_told(condition),
        }
        try:
            yield options
        except StoreError as problem:  # of the login; the client hangs the server's words on it
            raise problem from None
        except (AzureError, OSError, ValueError) as problem:
            raise problem_of(problem, self._named(key), condition, self._place) from None

    def _blob(self, key: str) -> BlobClient:
        return self._container().get_blob_client(self._place.prefix + key)

    def _named(self, key: str) -> str:
        return f"{self.url}/{key}"


def _connected(place: AzurePlace, login: TokenCredential | None) -> ContainerClient:
    import requests
    from azure.core.pipeline.transport import RequestsTransport

    from spotguard.storage.http.requests_adapter import keep_to_deadline

    be_quiet("urllib3.connectionpool", logging.INFO)  # below, it tells URLs with their SAS
    be_quiet("azure", logging.ERROR)  # it tells a page for each request, and what servers say
    session = keep_to_deadline(requests.Session())
    return connect(
        place,
        login,
        transport=RequestsTransport(session=session, connection_data_block_size=_PIECE_BYTES),
        retry_total=0,
        max_single_put_size=_LARGEST_BLOCK_BYTES,
        max_single_get_size=_LARGEST_BLOCK_BYTES,
    )


def _told(condition: Precondition) -> dict[str, Any]:
    from azure.core import MatchConditions

    if condition.if_absent:
        return {"match_condition": MatchConditions.IfMissing}
    if condition.if_match is None:
        return {}
    return {
        "etag": f'"{condition.if_match}"',
        "match_condition": MatchConditions.IfNotModified,
    }


def _is_object(entry: Any) -> bool:
    """Return whether a listing's entry is no folder; accounts with folders list those too."""
    name: str = entry.name
    return not name.endswith("/") and "hdi_isfolder" not in (entry.metadata or {})


def _bare(etag: object) -> str:
    return str(etag).strip('"')


def _md5_of(body: Sequence[memoryview]) -> bytes:
    digest = hashlib.md5(usedforsecurity=False)
    for view in body:
        digest.update(view)
    return digest.digest()
