"""Google Cloud Storage on loopback, as far as our bucket uses it, with the rules kept.

gcp-storage-emulator ignores preconditions, checksums and the limit of a composition; this does not.
Written from cloud.google.com/storage/docs/json_api, not from our client.
"""

from __future__ import annotations

import base64
import email.parser
import email.policy
import http.server
import itertools
import json
import re
import threading
from collections import deque
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from crc32c import crc32c

if TYPE_CHECKING:
    from types import TracebackType

_LIMIT = 32
_API = re.compile(
    r"(?P<way>/upload|/download)?/storage/v1/b/(?P<bucket>[^/]+)/o(?:/(?P<name>[^/]+))?"
)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """An object."""

    content: bytes
    generation: int
    created: str
    described: dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """What happens instead of the next answer."""

    status: int
    reason: str = ""
    message: str = ""
    cut_after_bytes: int | None = None
    """With status 0: the connection ends after so many bytes of the body."""
    flips: bool = False
    """With status 0: one bit of the answer's body is another."""
    damages: bool = False
    """With status 0: one bit of the request's body arrives as another."""


class Refused(Exception):
    """An answer that is not a success."""

    def __init__(self, status: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.reason = status, message, reason


@dataclass
class Asked:
    """A request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes = field(repr=False)


class FakeGcs:
    """The service, with one bucket. Thread-safe."""

    def __init__(self, bucket: str = "box", *, page_size: int = 1000) -> None:
        self.bucket = bucket
        self.objects: dict[str, Stored] = {}
        self.asked: list[Asked] = []
        self.faults: deque[Fault] = deque()
        self._sessions: dict[str, Asked] = {}
        self._page_size = page_size
        self._generations = itertools.count(1_700_000_000_000_000)
        self._lock = threading.RLock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.fake = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> FakeGcs:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    @property
    def endpoint(self) -> str:
        """What STORAGE_EMULATOR_HOST shall be."""
        return f"http://127.0.0.1:{self.port}"

    def answer(self, asked: Asked) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body."""
        with self._lock:
            self.asked.append(asked)
            try:
                return self._answer(asked)
            except Refused as no:
                return no.status, {}, _error(no.status, no.reason, no.message)

    def _answer(self, asked: Asked) -> tuple[int, dict[str, str], bytes]:
        if asked.path == "/batch/storage/v1":
            return self._batch(asked)
        if asked.query.get("upload_id") in self._sessions:
            return self._insert_in_session(asked)
        path, _, _verb = asked.path.partition("/compose")
        path, _, target = path.partition("/rewriteTo")
        found = _API.fullmatch(path)
        if found is None:
            raise Refused(404, "Not Found")
        if found["bucket"] != self.bucket:
            raise Refused(404, "The specified bucket does not exist.", "notFound")
        name = unquote(found["name"] or "")
        if asked.path.endswith("/compose"):
            return self._compose(asked, name)
        if target:
            return self._rewrite(asked, name, unquote(target.rpartition("/")[2]))
        if found["way"] == "/upload":
            return self._insert(asked)
        if asked.method == "DELETE":
            return self._delete(name)
        if not name:
            return self._list(asked.query)
        if asked.query.get("alt") == "media":
            return self._media(asked, name)
        return _json(self._resource(name))

    def _insert(self, asked: Asked) -> tuple[int, dict[str, str], bytes]:
        if asked.query["uploadType"] == "resumable":
            name = json.loads(asked.body)["name"]
            upload_id = quote(f"session-{len(self._sessions)}-of-{name}", safe="")
            self._sessions[unquote(upload_id)] = asked
            # By the name that the client knows it by: it may be reached through a proxy.
            host = f"http://{asked.headers['host']}"
            where = f"{host}{asked.path}?uploadType=resumable&upload_id={upload_id}"
            return 200, {"Location": where}, b""
        return self._proven(asked, *_related(asked))

    def _insert_in_session(self, asked: Asked) -> tuple[int, dict[str, str], bytes]:
        """Store what is sent whole, by one request, to a session opened before."""
        begun = self._sessions[asked.query["upload_id"]]
        if int(begun.headers["x-upload-content-length"]) != len(asked.body):
            raise Refused(400, "The length is not that of the session", "invalid")
        return self._proven(begun, json.loads(begun.body), asked.body)

    def _proven(
        self, asked: Asked, told: dict[str, Any], content: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        promised = told.pop("crc32c", None)
        if promised is not None and promised != _crc32c(content):
            raise Refused(400, f'Provided CRC32C "{promised}" doesn\'t match calculated', "invalid")
        name = told.pop("name")
        return self._store(asked, name, content, told)

    def _compose(self, asked: Asked, name: str) -> tuple[int, dict[str, str], bytes]:
        told = json.loads(asked.body)
        sources = [each["name"] for each in told["sourceObjects"]]
        if not 1 <= len(sources) <= _LIMIT:
            raise Refused(400, f"The number of source components must be 1-{_LIMIT}", "invalid")
        content = b"".join(self._found(source).content for source in sources)
        return self._store(asked, name, content, told.get("destination", {}))

    def _rewrite(self, asked: Asked, source: str, target: str) -> tuple[int, dict[str, str], bytes]:
        told = json.loads(asked.body)
        told.pop("kmsKeyName", None)  # the query alone says which key is to be used
        self._store(asked, target, self._found(source).content, told)
        size = str(len(self._found(target).content))
        sizes = {"totalBytesRewritten": size, "objectSize": size}
        return _json({"done": True, "resource": self._resource(target), **sizes})

    def _store(
        self, asked: Asked, name: str, content: bytes, described: dict[str, Any]
    ) -> tuple[int, dict[str, str], bytes]:
        wanted = asked.query.get("ifGenerationMatch")
        found = self.objects.get(name)
        if wanted is not None and int(wanted) != (found.generation if found else 0):
            raise Refused(412, "At least one of the pre-conditions you specified did not hold.")
        if len(name.encode()) > 1024:
            raise Refused(400, "The specified object name is too long.", "keyTooLong")
        kms_key = asked.query.get("kmsKeyName") or asked.query.get("destinationKmsKeyName")
        if kms_key:
            described = {**described, "kmsKeyName": kms_key}
        self.objects[name] = Stored(
            content=content,
            generation=next(self._generations),
            created=datetime.now(timezone.utc).isoformat().replace("+00:00", "Z"),
            described=described,
        )
        return _json(self._resource(name))

    def _delete(self, name: str) -> tuple[int, dict[str, str], bytes]:
        self._found(name)
        del self.objects[name]
        return 204, {}, b""

    def _media(self, asked: Asked, name: str) -> tuple[int, dict[str, str], bytes]:
        content = self._found(name).content
        headers = {"x-goog-hash": f"crc32c={_crc32c(content)}"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", asked.headers.get("range", ""))
        if wanted is None:
            return 200, headers, content
        first, last = int(wanted[1]), min(int(wanted[2]), len(content) - 1)
        if first >= len(content):
            raise Refused(416, "The requested range cannot be satisfied.")
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return 206, headers, content[first : last + 1]

    def _list(self, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        begin = query.get("pageToken") or query.get("startOffset", "")
        items: list[dict[str, Any]] = []
        folders: list[str] = []
        size = min(int(query.get("maxResults", 1000)), self._page_size)
        for name in sorted(self.objects):
            if not name.startswith(prefix) or name < begin:
                continue
            inside, slash, _ = name[len(prefix) :].partition(delimiter or "\0")
            folder = f"{prefix}{inside}{slash}"
            if folders and slash and folder == folders[-1]:
                continue
            if len(items) + len(folders) == size:
                told = {"items": items, "prefixes": folders, "nextPageToken": name}
                return _json(told)
            folders += [folder] if slash else []
            items += [] if slash else [self._resource(name)]
        return _json({"items": items, "prefixes": folders})

    def _batch(self, asked: Asked) -> tuple[int, dict[str, str], bytes]:
        body = re.sub(rb"\r?\n", b"\r\n", asked.body)  # either ends a line, in what is no content
        calls = _parts_of(replace(asked, body=body))
        if len(calls) > 100:
            raise Refused(400, "The batch request exceeds 100 calls", "invalid")
        answers = [self._answer_in_batch(call.decode()) for _, call in calls]
        return (
            200,
            {"Content-Type": "multipart/mixed; boundary=b"},
            f"{''.join(answers)}--b--".encode(),
        )

    def _answer_in_batch(self, call: str) -> str:
        """Return the part that answers one call of a batch."""
        method, target, _ = call.split(" ", 2)
        parts = urlsplit(target)
        try:
            status, _, _ = self._answer(
                Asked(method, parts.path, dict(parse_qsl(parts.query)), {}, b"")
            )
        except Refused as no:
            status = no.status
        return f"--b\r\nContent-Type: application/http\r\n\r\nHTTP/1.1 {status} X\r\n\r\n\r\n"

    def _found(self, name: str) -> Stored:
        if name not in self.objects:
            raise Refused(404, f"No such object: {self.bucket}/{name}", "notFound")
        return self.objects[name]

    def _resource(self, name: str) -> dict[str, Any]:
        found = self._found(name)
        kms_key = found.described.get("kmsKeyName")
        version = {"kmsKeyName": f"{kms_key}/cryptoKeyVersions/1"} if kms_key else {}
        return {
            **found.described,
            **version,
            "name": name,
            "size": str(len(found.content)),
            "generation": str(found.generation),
            "timeCreated": found.created,
        }


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    fake: FakeGcs


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        asked = Asked(self.command, parts.path, dict(parse_qsl(parts.query)), headers, body)
        fault = self.server.fake.faults.popleft() if self.server.fake.faults else None
        if fault and fault.status:
            error = _error(fault.status, fault.reason, fault.message)
            self._say(fault.status, {}, error)
            return
        if fault and fault.damages:
            asked = replace(asked, body=bytes([body[0] ^ 1]) + body[1:])
        status, said, content = self.server.fake.answer(asked)
        if fault and fault.flips:
            content = bytes([content[0] ^ 1]) + content[1:]
        self._say(status, said, content, cut=fault.cut_after_bytes if fault else None)

    def _say(
        self, status: int, headers: dict[str, str], body: bytes, *, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if cut is None else body[:cut])
        self.close_connection = self.close_connection or cut is not None

    do_GET = do_POST = do_PUT = do_DELETE = _serve


def _json(told: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(told).encode()


def _error(status: int, reason: str, message: str) -> bytes:
    errors = [{"reason": reason, "message": message}]
    return json.dumps({"error": {"code": status, "message": message, "errors": errors}}).encode()


def _crc32c(content: bytes) -> str:
    return base64.b64encode(crc32c(content).to_bytes(4, "big")).decode()


def _related(asked: Asked) -> tuple[dict[str, Any], bytes]:
    (_, told), (_, content) = _parts_of(asked)
    return json.loads(told), content


def _parts_of(asked: Asked) -> list[tuple[str, bytes]]:
    """Return headers and content of each part of a multipart body."""
    kind = email.parser.HeaderParser(policy=email.policy.HTTP).parsestr(
        f"Content-Type: {asked.headers['content-type']}\r\n\r\n"
    )
    border = b"--" + str(kind.get_boundary()).encode()
    pieces = asked.body.split(border)
    assert pieces[-1].startswith(b"--"), "the last border is missing"
    parts = []
    for piece in pieces[1:-1]:
        headers, _, content = piece.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        parts.append((headers.decode(), content.removesuffix(b"\r\n")))
    return parts
