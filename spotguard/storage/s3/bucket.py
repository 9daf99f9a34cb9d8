"""S3, and what speaks like it: MinIO, R2, Ceph and others, by boto3.

boto3 finds the credentials, the region and the server, writes the requests, signs them and reads
the answers. The bytes do not pass through it: its `before-send` event hands each signed request to
`connections.Connections`, which sends from, and receives into, the caller's memory, and whose
time-outs end at the caller's deadline. Each body has a CRC-32C that the server proves, so it is
not hashed a second time for the signature (`UNSIGNED-PAYLOAD`).
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qsl, urlencode, urlsplit

from spotguard.errors import NotFound, StoreError, StoreUnavailable, UsageError
from spotguard.shared.paths import expanded
from spotguard.storage.base import ObjectInfo
from spotguard.storage.buffers import within
from spotguard.storage.http.private_random import draw_privately
from spotguard.storage.remote.bucket import Page, PartRules, Upload
from spotguard.storage.remote.checksums import crc32c_of
from spotguard.storage.s3.errors import (
    UNUSABLE,
    Asked,
    from_answer,
    from_botocore,
    from_role,
    is_about_credentials,
    is_denial,
    is_of_a_role,
    unusable,
)
from spotguard.storage.s3.settings import checked_settings, need_boto3
from spotguard.storage.s3.signed_reads import SignedReads
from spotguard.storage.s3.transport import Body, Wire
from spotguard.storage.urls import is_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from boto3.session import Session
    from botocore.exceptions import ClientError
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import (
        GetObjectOutputTypeDef,
        HeadObjectOutputTypeDef,
        ObjectTypeDef,
    )

    from spotguard.storage.remote.bucket import Precondition

_MB = 1 << 20
_WRITER = "spotguard-writer"
_COLDEST: Literal["DEEP_ARCHIVE"] = "DEEP_ARCHIVE"
_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")
_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}")
"""What botocore takes: S3's own rules are narrower, but other servers' are not."""


class S3Bucket:
    """A prefix in a bucket: `s3://bucket/prefix?endpoint=http://...&region=...`. Thread-safe.

    Both settings may be left out: then botocore's own apply (AWS_ENDPOINT_URL_S3, the profile).
    SPOTGUARD_S3_SSE and SPOTGUARD_S3_SSE_KMS_KEY_ID say how the server encrypts what is written.
    """

    part_rules = PartRules(min_bytes=5 * _MB, max_bytes=5 << 30, max_parts=10_000)

    def __init__(self, url: str) -> None:
        """Nothing is touched yet.

        Raises:
            UsageError: it is not such a URL.
            MissingExtra: boto3 is not installed.
        """
        place, _, query = url.partition("?")
        self._bucket, _, prefix = place.partition("://")[2].partition("/")
        if "@" in self._bucket:
            raise UsageError(
                f"store s3://...@{self._bucket.rpartition('@')[2]} holds a login, and URLs are "
                "shown and kept",
                hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead",
            )
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._settings = checked_settings(dict(parse_qsl(query, keep_blank_values=True)), place)
        if not self._bucket:
            raise UsageError(f"store {place!r} names no bucket", hint="s3://BUCKET/PREFIX")
        if not _BUCKET.fullmatch(self._bucket):
            raise UsageError(
                f"store {place!r}: no bucket can be called {self._bucket!r}",
                hint="a bucket's name is letters, digits, dots and dashes",
            )
        need_boto3()
        self._wire = Wire(self._ca_bundle)
        self._signed_reads = SignedReads(self._wire)
        self._lock = threading.RLock()
        # Each made at its first use; no `cached_property`, whose lock all buckets would share.
        self._made_client: S3Client | None = None
        self._made_session: Session | None = None
        self._renewals = 0

    @property
    def url(self) -> str:
        """Where it is, in the form `open_store` takes; holds no secret."""
        query = urlencode(self._settings, safe=":/")
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/") + (f"?{query}" if query else "")

    @property
    def heeds_conditions(self) -> bool | None:
        """Whether conditions of writes are kept: by S3 itself, yes; others have to be tried."""
        return True if _is_aws(self._client) else None

    # ------------------------------------------------------------ writing

    def put(
        self, key: str, body: Sequence[memoryview], *, condition: Precondition, writer: str
    ) -> str:
        """Store the views, one after the other, as one object; return its etag."""
        with self._translated("s3:PutObject", key, if_match=condition.if_match is not None):
            answer = self._client.put_object(
                **self._at(key),
                Body=Body(body),  # type: ignore[arg-type]
                ChecksumAlgorithm="CRC32C",  # some servers keep the value only if this is said
                ChecksumCRC32C=crc32c_of(body),
                Metadata={_WRITER: writer},
                **_encryption(),
                **_only_if(condition),
            )
        return _etag(answer)

    def begin(self, key: str, *, writer: str) -> str:
        """Begin a write in parts; return its id."""
        return self._begin(key, Metadata={_WRITER: writer}, **_encryption())

    def put_part(self, key: str, upload_id: str, number: int, body: Sequence[memoryview]) -> str:
        """Store part `number` (from 1); return its etag and checksum."""
        checksum = crc32c_of(body)
        with self._translated("s3:PutObject", key):
            answer = self._client.upload_part(
                **self._at(key),
                UploadId=upload_id,
                PartNumber=number,
                Body=Body(body),  # type: ignore[arg-type]
                ChecksumCRC32C=checksum,
            )
        return f"{_etag(answer)} {checksum}"

    def finish(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[str],
        *,
        condition: Precondition,
        writer: str,
    ) -> str:
        """Make the parts, in this order, the object; return its etag."""
        named = []
        for number, part in enumerate(parts, 1):
            etag, checksum = part.split(" ")
            named.append({"PartNumber": number, "ETag": f'"{etag}"', "ChecksumCRC32C": checksum})
        return self._finish(key, upload_id, named, **_only_if(condition))

    def abort(self, key: str, upload_id: str) -> None:
        """Give a write in parts up and free its bytes; nothing happens if there is none."""
        with (
            contextlib.suppress(NotFound),
            self._translated("s3:AbortMultipartUpload", key),
        ):
            self._client.abort_multipart_upload(**self._at(key), UploadId=upload_id)

    def uploads(self, prefix: str) -> Sequence[Upload]:
        """Return writes in parts below `prefix` that were begun and not ended."""
        with self._translated("s3:ListBucketMultipartUploads", prefix):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            return [
                Upload(
                    key=each["Key"].removeprefix(self._prefix),
                    upload_id=each["UploadId"],
                    started_at=each["Initiated"].timestamp() if "Initiated" in each else None,
                )
                for page in pages
                for each in page.get("Uploads", [])
            ]

    def copy(self, source: str, target: str, *, condition: Precondition, writer: str) -> str:
        """Copy an object of at most 5 GiB on the server; return the new etag.

        S3 itself keeps a condition of a copy, others read it over. So there the bytes are put.
        """
        if condition and not _is_aws(self._client):
            body = [memoryview(self.get(source))]
            return self.put(target, body, condition=condition, writer=writer)
        with self._translated("s3:PutObject", target):
            answer = self._client.copy_object(
                **self._at(target),
                CopySource=self._at(source),
                MetadataDirective="REPLACE",
                Metadata={_WRITER: writer},
                **_encryption(),
                **_only_if(condition),
            )
            return _etag(answer["CopyObjectResult"])

    def delete(self, key: str) -> None:
        """Remove the object; nothing happens if there is none."""
        with contextlib.suppress(NotFound), self._translated("s3:DeleteObject", key):
            self._client.delete_object(**self._at(key))

    def archive(self, key: str) -> None:
        """Move the object to Glacier Deep Archive; it is read again after hours only."""
        found = self._head(key)
        if found is None:
            raise NotFound(f"there is no {self.url}/{key}")
        if _is_archived(found):
            return  # it cannot be copied, should the answer to an earlier try have been lost
        # One request copies as much as a part may hold, 5 GiB:
        # docs.aws.amazon.com/AmazonS3/latest/API/API_CopyObject
        if found["ContentLength"] > self.part_rules.max_bytes:
            self._archive_in_parts(key, found)
            return
        with self._translated("s3:PutObject", key):
            self._client.copy_object(
                **self._at(key),
                CopySource=self._at(key),
                StorageClass=_COLDEST,
                MetadataDirective="COPY",
                **_encryption_of(found),
            )

    def _archive_in_parts(self, key: str, found: HeadObjectOutputTypeDef) -> None:
        same = f'"{_etag(found)}"'  # what was replaced or pruned since stays so
        upload_id = self._begin(
            key,
            Metadata={_WRITER: found["Metadata"].get(_WRITER, "")},
            StorageClass=_COLDEST,
            **_encryption_of(found),
        )
        try:
            parts = [
                self._copy_part(key, upload_id, number, piece, CopySourceIfMatch=same)
                for number, piece in enumerate(self._pieces(found["ContentLength"]), 1)
            ]
            self._finish(key, upload_id, parts, IfMatch=same)
        except BaseException:
            with contextlib.suppress(StoreError):
                self.abort(key, upload_id)
            raise

    def _pieces(self, size_bytes: int) -> list[str]:
        """Return the ranges, first and last byte of each, that are copied by one request."""
        most = self.part_rules.max_bytes
        starts = range(0, size_bytes, most)
        return [f"bytes={start}-{min(start + most, size_bytes) - 1}" for start in starts]

    def _copy_part(
        self, key: str, upload_id: str, number: int, piece: str, **only_if: Any
    ) -> dict[str, Any]:
        with self._translated("s3:PutObject", key):
            answer = self._client.upload_part_copy(
                **self._at(key),
                UploadId=upload_id,
                PartNumber=number,
                CopySource=self._at(key),
                CopySourceRange=piece,
                **only_if,
            )["CopyPartResult"]
        told = {name: answer.get(name) for name in ("ETag", "ChecksumCRC32C")}
        return {"PartNumber": number, **{name: value for name, value in told.items() if value}}

    def _begin(self, key: str, **more: Any) -> str:
        with self._translated("s3:PutObject", key):
            answer = self._client.create_multipart_upload(
                **self._at(key), ChecksumAlgorithm="CRC32C", **more
            )
            return answer["UploadId"]

    def _finish(self, key: str, upload_id: str, parts: Sequence[Any], **only_if: Any) -> str:
        with self._translated("s3:PutObject", key, if_match="IfMatch" in only_if):
            answer = self._client.complete_multipart_upload(
                **self._at(key), UploadId=upload_id, MultipartUpload={"Parts": parts}, **only_if
            )
        return _etag(answer)

    # ------------------------------------------------------------ reading

    def get(self, key: str, max_bytes: int | None = None) -> bytes:
        """Return the whole object, proven by its checksum where the server keeps one."""

        def ask() -> tuple[bytes, str]:
            answer = self._client.get_object(**self._at(key), ChecksumMode="ENABLED")
            within(key, max_bytes, b"", answer.get("ContentLength"))
            return answer["Body"].read(), answer.get("ChecksumCRC32C", "")

        with self._translated("s3:GetObject", key), self._wire.taking(max_bytes):
            content, promised = ask() if max_bytes is None else self._signed_reads.get(key, ask)
        within(key, max_bytes, content)
        # Of an object made of parts it is a checksum of checksums, with the number of parts.
        if promised and "-" not in promised and promised != crc32c_of([memoryview(content)]):
            raise StoreUnavailable(f"the bytes of {key} were damaged on their way")
        return content

    def get_range(self, key: str, offset: int, into: Sequence[memoryview]) -> None:
        """Fill the views, one after the other, from byte `offset` on, from the socket itself."""
        wanted = sum(map(len, into))
        if not wanted:
            return
        with self._translated("s3:GetObject", key), self._wire.receiving(into) as received:
            answer = self._client.get_object(
                **self._at(key), Range=f"bytes={offset}-{offset + wanted - 1}"
            )
        if "ContentRange" not in answer:
            raise StoreError(f"{self.url} takes no ranges", hint="use another server")
        if answer["ContentLength"] < wanted and _ends_before(answer, offset + wanted):
            raise StoreError(f"{self.url}/{key} ends before byte {offset + wanted}")
        if received() < wanted:
            raise StoreUnavailable(f"the answer with {key} broke off")

    def head(self, key: str) -> ObjectInfo | None:
        """Return what a listing would say of `key`, or None."""
        found = self._head(key)
        if found is None:
            return None
        return ObjectInfo(
            key,
            found["ContentLength"],
            _etag(found),
            modified_at=_seconds_of(found.get("LastModified")),
            archived=_is_archived(found),
            readable=not _is_archived(found)
            or 'ongoing-request="false"' in str(found.get("Restore")),
        )

    def writer_of(self, key: str) -> str | None:
        """Return the `writer` that `key` was written by; None if there is no object or no word."""
        found = self._head(key)
        return None if found is None else found["Metadata"].get(_WRITER)

    def page(
        self, prefix: str, *, start_after: str = "", folders: bool = False, token: str | None = None
    ) -> Page:
        """Return a page of the objects whose key starts with `prefix`, sorted."""
        options = {
            "StartAfter": self._prefix + start_after if start_after else "",
            "Delimiter": "/" if folders else "",
            "ContinuationToken": token or "",
        }
        given: Any = {name: value for name, value in options.items() if value}

        def ask() -> Page:
            answer = self._client.list_objects_v2(
                Bucket=self._bucket, Prefix=self._prefix + prefix, **given
            )
            folders = [each["Prefix"] for each in answer.get("CommonPrefixes", [])]
            return Page(
                [self._info(each) for each in answer.get("Contents", [])],
                [folder.removeprefix(self._prefix) for folder in folders],
                answer.get("NextContinuationToken") if answer.get("IsTruncated") else None,
            )

        with self._translated("s3:ListBucket", prefix):
            return self._signed_reads.page((prefix, start_after, folders, token), ask)

    def _head(self, key: str) -> HeadObjectOutputTypeDef | None:
        with contextlib.suppress(NotFound), self._translated("s3:GetObject", key):
            return self._client.head_object(**self._at(key))
        return None

    def _info(self, found: ObjectTypeDef) -> ObjectInfo:
        return ObjectInfo(
            found["Key"].removeprefix(self._prefix),
            found["Size"],
            _etag(found),
            modified_at=found["LastModified"].timestamp(),
            archived=_is_archived(found),
            readable=not _is_archived(found),  # whether it was brought back, only `head` says
        )

    # ------------------------------------------------------------ the client

    @property
    def _client(self) -> S3Client:
        client = self._made_client
        if client is None:
            with self._lock, self._translated("s3:GetObject", ""):  # a session makes one at a time
                client = self._made_client = self._made_client or self._wired_client()
        return client

    def _wired_client(self) -> S3Client:
        client = self._new_client("auto")
        if not _is_aws(client):  # few other servers have a name for each bucket
            client = self._new_client("path")
        client.meta.events.register("before-send.s3", self._wire)  # type: ignore[arg-type]
        return client

    def _new_client(self, addressing: Literal["auto", "path"]) -> S3Client:
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        # Now, so that what is wrong with them is not taken for what is wrong with the endpoint.
        self._session.get_credentials()
        config = Config(
            retries={"total_max_attempts": 1},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"payload_signing_enabled": False, "addressing_style": addressing},
        )
        client: S3Client | None = None
        try:
            client = self._session.client(
                "s3",
                endpoint_url=self._settings.get("endpoint"),
                region_name=self._region,
                config=config,
            )
        except BotoCoreError:  # of which some are a ValueError as well
            raise
        except ValueError:  # botocore's word for an endpoint, which it repeats, password and all
            pass
        if client is None or not is_server(client.meta.endpoint_url):
            raise StoreError(
                f"the endpoint of {self.url} is no URL",
                hint="set AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL to https://HOST, or to nothing",
            )
        return client

    @property
    def _region(self) -> str:
        # A server of one's own rarely minds, but botocore must have one to sign for.
        return self._settings.get("region") or self._session.region_name or "us-east-1"

    @property
    def _session(self) -> Session:
        import boto3

        session = self._made_session
        if session is None:
            draw_privately("boto3")
            with self._lock:
                session = self._made_session = self._made_session or boto3.session.Session()
        return session

    def _ca_bundle(self) -> str | None:
        """Return the file that AWS_CA_BUNDLE or the profile's `ca_bundle` names, as in the AWS CLI.

        Before SSL_CERT_FILE, which environments of conda set for all programs.
        """
        from botocore.session import get_session

        found = get_session().get_config_variable("ca_bundle")
        return str(expanded(found)) if found else None

    def _secrets(self) -> tuple[str, ...]:
        """Return what no message may repeat."""
        from botocore.exceptions import BotoCoreError, ClientError

        with contextlib.suppress(BotoCoreError, ClientError, *UNUSABLE):
            found = self._session.get_credentials()
            if found is not None:
                return tuple(filter(None, found.get_frozen_credentials()[:3]))
        return ()

    def _renewed(self, seen: int) -> bool:
        """Look for credentials again; return whether there are others than `seen` renewals ago.

        botocore reads a file only once, and renews by its own clock, not by what S3 says.
        """
        with self._lock:
            if self._renewals == seen:
                before = self._secrets()
                self._made_session = None
                if self._secrets() == before:
                    return False
                self._made_client = None
                self._renewals += 1
            return True

    def _at(self, key: str) -> Any:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    @contextlib.contextmanager
    def _translated(self, right: str, key: str, *, if_match: bool = False) -> Iterator[None]:
        """Turn what botocore raises into the store's own errors."""
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        asked = Asked(
            right=right, bucket=self._bucket, prefix=self._prefix, key=key, if_match=if_match
        )
        renewals = self._renewals
        try:
            yield
        except ClientError as problem:
            # Not `from problem`: it repeats what the server said, which can be what it was sent.
            refused = self._refused(problem, asked)
            if is_about_credentials(problem.response) and self._renewed(renewals):
                refused = StoreUnavailable(refused.message, hint=refused.hint)
            if right == "s3:GetObject" and is_denial(problem.response) and self._is_absent(key):
                refused = NotFound(f"there is no {asked.where}")
            raise refused from None
        except BotoCoreError as problem:
            raise from_botocore(problem, asked) from None
        except (ResponseParserError, KeyError):  # nothing to parse, or not what was asked for
            raise StoreUnavailable(
                f"what answers for {asked.where} does not speak S3",
                hint="check the endpoint, and that no proxy answers for it",
            ) from None
        except UNUSABLE as problem:  # the network's were told by `connections`, in our words
            raise unusable(problem, asked) from None

    def _is_absent(self, key: str) -> bool:
        """Tell whether a list proves that there is no such object.

        S3 calls it "denied" for who may not list the whole bucket: a read names no prefix.
        """
        try:
            return all(each.key != key for each in self.page(key).objects)
        except StoreError:
            return False

    def _refused(self, problem: ClientError, asked: Asked) -> StoreError:
        if is_of_a_role(problem):  # to look for secrets would be to ask for them once more
            return from_role(problem.response, asked)
        return from_answer(problem.response, replace(asked, secrets=self._secrets()))


def _is_aws(client: S3Client) -> bool:
    host = urlsplit(client.meta.endpoint_url).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _etag(answer: Any) -> str:
    # Some servers leave the quotes out, and not everywhere: ours never has them.
    etag = str(answer.get("ETag", "")).strip('"')
    if not etag:  # rclone's, where another writer is at the same key
        raise StoreUnavailable("the store tells no etag, so no write could be told from another")
    return etag


def _seconds_of(instant: datetime | None) -> float | None:
    return instant.timestamp() if instant else None  # not all servers say it


def _is_archived(found: Any) -> bool:
    """Return whether an object was moved, by us or by a rule, to where it is not read at once."""
    return found.get("StorageClass") in _ARCHIVES or bool(found.get("ArchiveStatus"))


def _ends_before(answer: GetObjectOutputTypeDef, end: int) -> bool:
    """Return whether the object has no more; else only this answer is too short."""
    total = answer["ContentRange"].rpartition("/")[2]
    return not total.isdigit() or int(total) < end


def _only_if(condition: Precondition) -> dict[str, Any]:
    if condition.if_absent:
        return {"IfNoneMatch": "*"}
    return {"IfMatch": f'"{condition.if_match}"'} if condition.if_match is not None else {}


def _encryption() -> dict[str, Any]:
    how = os.environ.get("SPOTGUARD_S3_SSE", "")
    key = os.environ.get("SPOTGUARD_S3_SSE_KMS_KEY_ID", "")
    if key and not how:
        how = "aws:kms"
    given = {"ServerSideEncryption": how, "SSEKMSKeyId": key}
    return {name: value for name, value in given.items() if value}


def _encryption_of(found: HeadObjectOutputTypeDef) -> dict[str, Any]:
    """Return how an object is encrypted: without a word of it, a copy is as the bucket likes."""
    told: Any = found
    return {name: told[name] for name in ("ServerSideEncryption", "SSEKMSKeyId") if name in told}
