"""Google Cloud Storage as a bucket, by the vendor's client.

Large objects go up as part objects that are then composed ("parallel composite upload"): the other
way, XML multipart uploads, knows no conditions (cloud.google.com/storage/docs/multipart-uploads).
Parts lie below the reserved name, where no listing of ours shows them. Every object and part is
sent with its crc32c, which the service proves.

The client would hold a part twice more to send it, at half the speed and six times the CPU. So it
opens an upload session for each part (`create_resumable_upload_session`), and the part goes there
by one request from where it is.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from spotguard.errors import MissingExtra, NotFound, StoreError, StoreUnavailable, UsageError
from spotguard.storage.base import ObjectInfo
from spotguard.storage.deadline import timeout_s
from spotguard.storage.gcs.errors import lost, problem_of
from spotguard.storage.http.connections import CONNECT_S, SILENCE_S
from spotguard.storage.http.private_random import draw_privately
from spotguard.storage.http.sdk_bodies import Gathered, Incoming, Outgoing, PerProcess, be_quiet
from spotguard.storage.keys import RESERVED
from spotguard.storage.remote.bucket import ALWAYS, Page, PartRules, Upload
from spotguard.storage.remote.checksums import crc32c_of
from spotguard.storage.urls import taken_apart

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from google.auth.credentials import Credentials

    from spotguard.storage.remote.bucket import Precondition

PARTS = f"{RESERVED}/parts/"
_WRITER = "spotguard-writer"
_BYTES = "application/octet-stream"
_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
_COMPOSED_AT_ONCE = 32
_DELETED_AT_ONCE = 100
_PAGE_KEYS = 1000
_LISTED = "nextPageToken,prefixes,items(name,size,generation,timeCreated,storageClass)"
_COLDEST = "ARCHIVE"


def open_gcs(url: str) -> GcsBucket:
    """Return the bucket of `gs://BUCKET/PREFIX`; asks no server."""
    parts = taken_apart(url)
    if not parts.netloc or parts.query or parts.fragment or "@" in parts.netloc:
        raise UsageError(
            f"store gs://{parts.hostname or ''}{parts.path} is not a bucket and a prefix alone",
            hint="write gs://BUCKET/PREFIX",
        )
    _need_packages()
    prefix = parts.path.strip("/")
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "").strip().rstrip("/")
    if emulator and "://" not in emulator:
        emulator = f"http://{emulator}"
    place = GcsPlace(bucket=parts.netloc, prefix=f"{prefix}/" if prefix else "", emulator=emulator)
    return GcsBucket(place)


def _need_packages() -> None:
    # To look for a package imports those that it is in, which are empty; but they must be there.
    for name in ("crc32c", "google", "google.cloud", "google.cloud.storage"):
        if importlib.util.find_spec(name) is None:
            raise MissingExtra(
                "stores at gs:// need google-cloud-storage and crc32c, which are not installed",
                hint="pip install 'spotguard[gcp]'",
            )


@dataclass(frozen=True, kw_only=True)
class GcsPlace:
    """A prefix in a bucket."""

    bucket: str
    prefix: str = ""
    """Empty, or with a trailing `/`."""
    emulator: str = ""
    """Its URL. Some ignore conditions; none wants credentials."""


class _Link(NamedTuple):
    bucket: Any  # the vendor's classes are not typed
    session: Any


class GcsBucket:
    """A prefix in a bucket. An object's etag is its generation."""

    part_rules = PartRules(min_bytes=1, max_bytes=5 << 40, max_parts=_COMPOSED_AT_ONCE**2)

    def __init__(self, place: GcsPlace, credentials: Credentials | None = None) -> None:
        self._place = place
        self._link = PerProcess(lambda: _connected(place, credentials))
        self._kms_key = os.environ.get("SPOTGUARD_GCS_KMS_KEY", "").strip() or None

    def __repr__(self) -> str:
        return f"GcsBucket({self.url!r})"

    @property
    def url(self) -> str:
        """The bucket and the prefix."""
        return f"gs://{self._place.bucket}/{self._place.prefix}".rstrip("/")

    @property
    def heeds_conditions(self) -> bool | None:
        """The service does; an emulator has to be tried."""
        return None if self._place.emulator else True

    def close(self) -> None:
        """Close the connections; the next request opens new ones."""
        link = self._link.pop()
        if link:
            link.session.close()

    # ------------------------------------------------------------ writing

    def put(
        self, key: str, body: Sequence[memoryview], *, condition: Precondition, writer: str
    ) -> str:
        """Store the views as one object, joined: only small ones are not put in parts."""
        with self._asking(key, condition) as (blob, options):
            blob.metadata = {_WRITER: writer}
            blob.crc32c = crc32c_of(body)
            blob.upload_from_string(b"".join(body), content_type=_BYTES, checksum=None, **options)
            return str(blob.generation)

    def begin(self, key: str, *, writer: str) -> str:
        """Return an id for a write in parts; the service need not be told."""
        return secrets.token_hex(16)

    def put_part(self, key: str, upload_id: str, number: int, body: Sequence[memoryview]) -> str:
        """Store one part as an object of its own; return its name."""
        from google.api_core.exceptions import from_http_response

        name = f"{number:05}"
        outgoing = Outgoing(body)
        with self._asking(f"{_folder(key, upload_id)}{name}") as (blob, options):
            # Deleting from a colder class than this within weeks costs as if it had stayed.
            blob.storage_class = "STANDARD"
            blob.crc32c = crc32c_of(body)
            session_url = blob.create_resumable_upload_session(
                content_type=_BYTES, size=len(outgoing), checksum=None, **options
            )
            answer = self._link().session.put(
                session_url, data=outgoing, timeout=options["timeout"]
            )
            if answer.status_code not in (200, 201):
                raise from_http_response(answer)  # type: ignore[no-untyped-call]
        return name

    def finish(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[str],
        *,
        condition: Precondition,
        writer: str,
    ) -> str:
        """Compose the parts, in groups if there are many, and delete them; return the etag."""
        folder = _folder(key, upload_id)
        sources = [f"{folder}{part}" for part in parts]
        used = list(sources)
        while len(sources) > _COMPOSED_AT_ONCE:
            sources = self._composed_in_groups(f"{folder}{len(sources)}-", sources)
            used += sources
        with self._asking(key, condition) as (blob, options):
            blob.metadata = {_WRITER: writer}
            blob.content_type = _BYTES
            blob.compose([self._blob(source) for source in sources], **options)
        self._discard(used)
        return str(blob.generation)

    def copy(self, source: str, target: str, *, condition: Precondition, writer: str) -> str:
        """Copy an object on the server, a piece a request where it is much; return the etag."""
        token: str | None = None
        with self._asking(target, condition) as (blob, options):
            blob.metadata = {_WRITER: writer}
            while True:
                token, _, _ = blob.rewrite(self._blob(source), token=token, **options)
                if token is None:
                    return str(blob.generation)

    def abort(self, key: str, upload_id: str) -> None:
        """Delete the parts that were stored."""
        self._discard([info.key for info in self._below(_folder(key, upload_id))])

    def uploads(self, prefix: str) -> Sequence[Upload]:
        """Return the writes that left parts, and when each stored its first one."""
        found: dict[tuple[str, str], Upload] = {}
        for info in self._below(f"{PARTS}{prefix}"):
            key, upload_id, _ = info.key.removeprefix(PARTS).rsplit("/", 2)
            upload = Upload(key=key, upload_id=upload_id, started_at=info.modified_at)
            found.setdefault((key, upload_id), upload)
        return list(found.values())

    def delete(self, key: str) -> None:
        """Remove the object; nothing happens if there is none."""
        with contextlib.suppress(NotFound), self._asking(key) as (blob, options):
            blob.delete(**options)

    def archive(self, key: str) -> None:
        """Move the object to the class ARCHIVE; what is there is not written, and paid, anew."""
        with self._asking(key) as (blob, options):
            blob.reload(**options)
            if blob.storage_class != _COLDEST:
                if blob.kms_key_name:  # a rewrite reads over the name of one version of a key
                    blob.kms_key_name = blob.kms_key_name.partition("/cryptoKeyVersions/")[0]
                blob.update_storage_class(_COLDEST, **options)

    def _composed_in_groups(self, stem: str, sources: Sequence[str]) -> list[str]:
        targets = []
        for first in range(0, len(sources), _COMPOSED_AT_ONCE):
            targets.append(f"{stem}{first:05}")
            group = sources[first : first + _COMPOSED_AT_ONCE]
            with self._asking(targets[-1]) as (blob, options):
                blob.storage_class = "STANDARD"
                blob.compose([self._blob(source) for source in group], **options)
        return targets

    def _discard(self, keys: Sequence[str]) -> None:
        """Delete the objects, many a request; what is not deleted is left for `clean_up`."""
        for first in range(0, len(keys), _DELETED_AT_ONCE):
            group = keys[first : first + _DELETED_AT_ONCE]
            # What the parts became is there all the same.
            with (
                contextlib.suppress(StoreError),
                self._asking(group[0]) as (blob, options),
                blob.client.batch(raise_exception=False),
            ):
                for key in group:
                    self._blob(key).delete(**options)

    # ------------------------------------------------------------ reading

    def get(self, key: str, max_bytes: int | None = None) -> bytes:
        """Return the whole object, proven by its crc32c."""
        gathered = Gathered(key, max_bytes)
        with self._asking(key) as (blob, options):
            blob.download_to_file(gathered, raw_download=True, checksum=None, **options)
        body = gathered.getvalue()
        if blob.crc32c and blob.crc32c != crc32c_of([memoryview(body)]):
            raise StoreUnavailable(f"{self._named(key)} arrived damaged")
        return body

    def get_range(self, key: str, offset: int, into: Sequence[memoryview]) -> None:
        """Fill the views from byte `offset` on."""
        incoming = Incoming(into)
        end = offset + incoming.missing_bytes
        if offset == end:
            return
        with self._asking(key) as (blob, options):
            blob.download_to_file(
                incoming, start=offset, end=end - 1, raw_download=True, checksum=None, **options
            )
        if incoming.missing_bytes:
            raise self._too_short(key, end)

    def _too_short(self, key: str, end: int) -> StoreError:
        """Return why there were fewer bytes than asked for: the object, or the answer, ended."""
        found = self.head(key)
        if found and found.size_bytes >= end:
            return StoreUnavailable(f"the connection broke while {self._named(key)} was read")
        return StoreError(f"{self._named(key)} ends before byte {end}")

    def head(self, key: str) -> ObjectInfo | None:
        """Return what a listing would say of `key`, or None."""
        blob = self._described(key)
        return self._info(blob) if blob else None

    def writer_of(self, key: str) -> str | None:
        """Return who wrote `key`."""
        blob = self._described(key)
        return (blob.metadata or {}).get(_WRITER) if blob else None

    def page(
        self, prefix: str, *, start_after: str = "", folders: bool = False, token: str | None = None
    ) -> Page:
        """Return a page of the matching objects, from `start_after` on."""
        root = self._place.prefix
        with self._asking(prefix) as (blob, options):
            listing = blob.client.list_blobs(
                blob.bucket,
                prefix=root + prefix,
                start_offset=root + start_after if start_after else None,
                delimiter="/" if folders else None,
                page_token=token,
                page_size=_PAGE_KEYS,
                fields=_LISTED,
                **options,
            )
            found = list(next(listing.pages))
        # Programs that show folders store empty objects of their names.
        return Page(
            [self._info(each) for each in found if not each.name.endswith("/")],
            sorted(each[len(root) :] for each in listing.prefixes),
            listing.next_page_token,
        )

    def _below(self, prefix: str) -> Iterator[ObjectInfo]:
        token: str | None = None
        while True:
            page = self.page(prefix, token=token)
            yield from page.objects
            token = page.next_token
            if token is None:
                return

    def _described(self, key: str) -> Any:
        with contextlib.suppress(NotFound), self._asking(key) as (blob, options):
            blob.reload(**options)
            return blob
        return None

    def _info(self, blob: Any) -> ObjectInfo:
        key = blob.name[len(self._place.prefix) :]
        return ObjectInfo(
            key,
            blob.size,
            str(blob.generation),
            blob.time_created.timestamp(),
            archived=blob.storage_class == _COLDEST,  # and can be read at once, for a price
        )

    # ------------------------------------------------------------ asking

    @contextlib.contextmanager
    def _asking(
        self, key: str, condition: Precondition = ALWAYS
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Give what asks for an object, with time limits and condition; errors become ours."""
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from urllib3.exceptions import HTTPError

        options = {
            "timeout": (timeout_s(CONNECT_S), timeout_s(SILENCE_S)),
            "retry": None,
            **self._told(key, condition),
        }
        try:
            yield self._blob(key), options
        except (GoogleAPIError, GoogleAuthError, HTTPError, OSError, ValueError) as problem:
            told = problem_of(problem, self._named(key), condition, self._place.bucket)
            # Where there is no new token, the client leaves the refusal unread, connection and all.
            traceback.clear_frames(problem.__traceback__)
            raise told from None

    def _blob(self, key: str) -> Any:
        return self._link().bucket.blob(self._place.prefix + key, kms_key_name=self._kms_key)

    def _told(self, key: str, condition: Precondition) -> dict[str, int]:
        if condition.if_absent:
            return {"if_generation_match": 0}
        if condition.if_match is None:
            return {}
        if not condition.if_match.isdecimal() or condition.if_match == "0":
            raise lost(self._named(key), condition)  # no object has such a generation
        return {"if_generation_match": int(condition.if_match)}

    def _named(self, key: str) -> str:
        return f"{self.url}/{key}"


def _connected(place: GcsPlace, credentials: Credentials | None) -> _Link:
    import google.auth
    from google.auth.credentials import AnonymousCredentials
    from google.auth.transport.requests import AuthorizedSession
    from google.cloud.storage import Client

    from spotguard.storage.http.requests_adapter import keep_to_deadline

    draw_privately("google")
    be_quiet("urllib3.connectionpool", logging.INFO)  # below, it tells URLs that need no login
    # Else the client asks, in a thread of its own, what the bucket is, to name it in traces.
    os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
    if place.emulator:
        credentials = credentials or AnonymousCredentials()  # type: ignore[no-untyped-call]
    elif credentials is None:
        credentials, _project = google.auth.default(scopes=[_SCOPE])
    session: Any = AuthorizedSession(credentials, refresh_timeout=SILENCE_S)  # type: ignore[no-untyped-call]
    keep_to_deadline(session)
    session.configure_mtls_channel()
    client = Client(
        project=None,
        credentials=credentials,
        _http=session,
        client_options={"api_endpoint": place.emulator} if place.emulator else None,
    )
    return _Link(client.bucket(place.bucket), session)


def _folder(key: str, upload_id: str) -> str:
    return f"{PARTS}{key}/{upload_id}/"
