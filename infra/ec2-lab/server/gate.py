"""What stands before moto: who asks what, may they, does it fail, was it asked before.

An AWS SDK signs each request with a key, so the identity stands in its header, and marks all tries
of one call with the same invocation id. A fault that hits "once" hits all tries of one call: the
SDK's own retries would hide it otherwise.
"""

from __future__ import annotations

import contextlib
import io
import re
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

import account
import journal
import prices
import settings
import spot_requests
import unseen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from _typeshed.wsgi import StartResponse, WSGIEnvironment

_CREDENTIAL = re.compile(r"Credential=([^/]+)/\d+/([^/]+)/([^/]+)/aws4_request")
_KINDS = ("throttle", "error", "lost", "slow", "deny", "unseen")

_DONE = ("lost", "unseen")
"""Faults of calls that are carried out."""


@dataclass
class Call:
    """One request, as far as AWS would understand it."""

    service: str
    actions: list[tuple[str, str]]
    """The rights that it needs, each with the ARN it is about; the first names the call."""
    key: str
    region: str
    invocation: str
    attempt: str
    form: dict[str, list[str]] = field(default_factory=dict)
    prefix: str | None = None
    """Of a list in S3."""

    @property
    def name(self) -> str:
        """Such as `ec2:RunInstances`."""
        return self.actions[0][0]


@dataclass
class Rule:
    """A fault that some calls meet."""

    action: str
    """A pattern such as `ec2:RunInstances` or `s3:*`."""
    kind: str
    times: int | None
    """Calls that it hits; None is all."""
    seconds: float = 0.0
    who: str = "*"
    region: str = "*"
    hit: list[str] = field(default_factory=list)
    """The invocations that it has hit."""

    def __post_init__(self) -> None:
        """Refuse what is no fault."""
        if self.kind not in _KINDS:
            raise ValueError(f"{self.kind}: not one of {', '.join(_KINDS)}")

    def hits(self, call: Call) -> bool:
        """Tell whether this call meets it, and count it."""
        if not any(fnmatchcase(action, self.action) for action, _ in call.actions):
            return False
        if not (fnmatchcase(call.key, self.who) and fnmatchcase(call.region, self.region)):
            return False
        if call.invocation in self.hit:
            return True
        if self.times is not None and len(self.hit) >= self.times:
            return False
        self.hit.append(call.invocation)
        return True


class Gate:
    """A WSGI application around moto's."""

    def __init__(self, moto: Callable[..., Iterable[bytes]]) -> None:
        self._moto = moto
        self.rules: list[Rule] = []
        self.policy: dict[str, Any] | None = None
        """What calls about `bucket` must be allowed by; an administrator's are. None: all are."""
        self.bucket = ""
        self._launched: dict[str, tuple[str, list[tuple[str, str]], bytes]] = {}
        """What each client token of RunInstances was answered."""
        self._lock = threading.Lock()
        self._one_by_one = threading.Lock()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Let a call pass, or answer in AWS' place."""
        size = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read(size) if size else b""
        environ["wsgi.input"] = io.BytesIO(body)
        call = understand(environ, body)
        if call is None or call.key == settings.ADMIN_KEY:
            return self._moto(environ, start_response)
        began_at = time.time()
        status, headers, answer = self._answer(call, environ)
        code = re.search(rb"<Code>([^<]+)</Code>", answer[:4000]) if status >= "3" else None
        journal.note_call(
            {
                "at": round(began_at, 3),
                "s": round(time.time() - began_at, 3),
                "call": call.name,
                "actions": [action for action, _ in call.actions],
                "about": call.actions[0][1],
                "key": call.key,
                "region": call.region,
                "from": environ.get("REMOTE_ADDR", ""),
                "agent": environ.get("HTTP_USER_AGENT", "")[:60],
                "invocation": call.invocation,
                "attempt": call.attempt,
                "status": int(status[:3]),
                "code": code[1].decode() if code else "",
            }
        )
        start_response(status, headers)
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [answer]

    def _answer(
        self, call: Call, environ: WSGIEnvironment
    ) -> tuple[str, list[tuple[str, str]], bytes]:
        with self._lock:
            rule = next((rule for rule in self.rules if rule.hits(call)), None)
        if rule is not None and rule.kind == "slow":
            time.sleep(rule.seconds)
            rule = None
        if unseen.names(call.form) and rule is None:
            return _failure(call, "unknown")
        if rule is not None and rule.kind not in _DONE:
            journal.note(f"{call.name} meets {rule.kind}")
            return _failure(call, rule.kind)
        if not self._may(call):
            return _failure(call, "deny")
        answer = self._passed(call, environ)
        if self._is_guarded(call) and answer[0].startswith("404"):
            # Who may not list a bucket is not told that an object is absent.
            bucket = call.actions[0][1].partition("/")[0]
            if call.prefix is None and not self._allowed("s3:ListBucket", bucket, None):
                return _failure(call, "deny")
        if rule is None:
            return unseen.without(answer) if call.name == "ec2:DescribeInstances" else answer
        if rule.kind == "unseen":
            journal.note(f"{call.name} was done, but others do not see it")
            unseen.note(answer[2], rule.seconds)
            return answer
        journal.note(f"{call.name} was done, but the answer is lost")
        account.keep_pending(unseen.instances_in(answer[2]), rule.seconds)
        return _failure(call, "error")

    def _passed(
        self, call: Call, environ: WSGIEnvironment
    ) -> tuple[str, list[tuple[str, str]], bytes]:
        if call.name == "ec2:DescribeSpotPriceHistory":
            return _xml(prices.history(call.region, call.form))
        if call.name == "ec2:DescribeSpotInstanceRequests":
            return _xml(spot_requests.describe(call.region, call.form))
        token = (call.form.get("ClientToken") or [""])[0]
        if call.name == "ec2:RunInstances" and token in self._launched:
            return self._launched[token]  # the same launch, asked for again
        told: list[Any] = []
        # moto's S3 iterates over a bucket's keys as they change, and fails: one call at a time.
        with self._one_by_one if call.service == "s3" else contextlib.nullcontext():
            parts = self._moto(environ, lambda *words, **_: told.extend(words[:2]))
            answer = (str(told[0]), list(told[1]), b"".join(parts))
        if call.name == "ec2:RunInstances" and token and answer[0].startswith("200"):
            self._launched[token] = answer
        return answer

    # ------------------------------------------------------------ rights

    def _is_guarded(self, call: Call) -> bool:
        """Tell whether somebody has to have a right for it: other buckets are not looked at."""
        if self.policy is None or call.service != "s3":
            return False
        whole = f"arn:aws:s3:::{self.bucket}"
        return any(arn in (whole, "*") or arn.startswith(f"{whole}/") for _, arn in call.actions)

    def _may(self, call: Call) -> bool:
        if not self._is_guarded(call):
            return True
        return all(self._allowed(action, arn, call.prefix) for action, arn in call.actions)

    def _allowed(self, action: str, arn: str, prefix: str | None) -> bool:
        """Tell whether the policy allows it: nothing is unless a statement says so."""
        assert self.policy is not None
        effects = {
            statement["Effect"]
            for statement in self.policy["Statement"]
            if _matches(action, statement["Action"])
            and _matches(arn, statement["Resource"])
            and _holds(statement.get("Condition", {}), prefix)
        }
        return effects == {"Allow"}


def _matches(value: str, patterns: str | list[str]) -> bool:
    patterns = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatchcase(value, pattern) for pattern in patterns)


def _holds(condition: Mapping[str, Mapping[str, Any]], prefix: str | None) -> bool:
    """Tell whether a condition holds; one that is not understood does not."""
    for test, keys in condition.items():
        for key, patterns in keys.items():
            if key != "s3:prefix":
                return False
            if test == "Null":
                if (prefix is None) != (str(patterns).lower() == "true"):
                    return False
            elif (
                test not in ("StringLike", "StringEquals")
                or prefix is None
                or not _matches(prefix, patterns)
            ):
                return False
    return True


# ---------------------------------------------------------------- reading a request


def understand(environ: WSGIEnvironment, body: bytes) -> Call | None:
    """Return what a request asks; None for what is no call of an AWS SDK."""
    signed = _CREDENTIAL.search(environ.get("HTTP_AUTHORIZATION", ""))
    if signed is None:
        return None
    key, region, service = signed.groups()
    tries = re.search(r"attempt=(\d+)", environ.get("HTTP_AMZ_SDK_REQUEST", ""))
    call = Call(
        service=service,
        actions=[],
        key=key,
        region=region,
        invocation=environ.get("HTTP_AMZ_SDK_INVOCATION_ID", "") or f"{time.time_ns()}",
        attempt=tries[1] if tries else "1",
    )
    if service in ("s3", "s3express"):
        _understand_s3(call, environ)
    elif "HTTP_X_AMZ_TARGET" in environ:
        operation = environ["HTTP_X_AMZ_TARGET"].rpartition(".")[2]
        call.actions = [(f"{service}:{operation}", "*")]
    else:
        call.form = urllib.parse.parse_qs(body.decode(errors="replace"), keep_blank_values=True)
        operation = (call.form.get("Action") or ["Unknown"])[0]
        call.actions = [(f"{service}:{operation}", "*")]
    return call


def _understand_s3(call: Call, environ: WSGIEnvironment) -> None:
    query = urllib.parse.parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    bucket, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
    method = environ["REQUEST_METHOD"]
    arn = f"arn:aws:s3:::{bucket}"
    if not bucket:
        call.actions = [("s3:ListAllMyBuckets", "*")]
    elif key:
        call.actions = [(_object_action(method, query), f"{arn}/{key}")]
        source = environ.get("HTTP_X_AMZ_COPY_SOURCE")
        if source:
            source = urllib.parse.unquote(source).lstrip("/").partition("?")[0]
            call.actions.append(("s3:GetObject", f"arn:aws:s3:::{source}"))
    else:
        call.actions = [(_bucket_action(method, query), arn)]
        if call.name == "s3:ListBucket" and method == "GET":
            call.prefix = (query.get("prefix") or [None])[0]


def _object_action(method: str, query: Mapping[str, Any]) -> str:
    if method == "DELETE":
        return "s3:AbortMultipartUpload" if "uploadId" in query else "s3:DeleteObject"
    if method in ("PUT", "POST"):
        return "s3:PutObjectTagging" if "tagging" in query else "s3:PutObject"
    return "s3:ListMultipartUploadParts" if "uploadId" in query else "s3:GetObject"


_OF_BUCKET = {
    "uploads": "ListBucketMultipartUploads",
    "location": "GetBucketLocation",
    "versioning": "GetBucketVersioning",
    "lifecycle": "GetLifecycleConfiguration",
    "encryption": "GetEncryptionConfiguration",
    "policy": "GetBucketPolicy",
    "tagging": "GetBucketTagging",
    "versions": "ListBucketVersions",
}


def _bucket_action(method: str, query: Mapping[str, Any]) -> str:
    named = next((action for word, action in _OF_BUCKET.items() if word in query), None)
    if named is not None:
        return f"s3:{named.replace('Get', 'Put') if method == 'PUT' else named}"
    if method == "POST" and "delete" in query:
        return "s3:DeleteObject"
    whole = {"PUT": "s3:CreateBucket", "DELETE": "s3:DeleteBucket"}
    return whole.get(method, "s3:ListBucket")


# ---------------------------------------------------------------- answering in AWS' place


def _xml(text: str) -> tuple[str, list[tuple[str, str]], bytes]:
    return "200 OK", [("Content-Type", "text/xml;charset=UTF-8")], text.encode()


_WORDS = {
    "throttle": "Request limit exceeded.",
    "error": "An internal error has occurred",
}


def _failure(call: Call, kind: str) -> tuple[str, list[tuple[str, str]], bytes]:
    status, code, words = _said(call, kind)
    if call.service == "s3":
        shape = "<Error><Code>{}</Code><Message>{}</Message></Error>"
    elif call.service == "ec2":
        shape = (
            "<Response><Errors><Error><Code>{}</Code><Message>{}</Message></Error></Errors>"
            "<RequestID>ec2-lab</RequestID></Response>"
        )
    else:
        shape = (
            "<ErrorResponse><Error><Type>Sender</Type><Code>{}</Code><Message>{}</Message></Error>"
            "<RequestId>ec2-lab</RequestId></ErrorResponse>"
        )
    body = shape.format(code, escape(words)).encode()
    return status, [("Content-Type", "text/xml"), ("Content-Length", str(len(body)))], body


def _said(call: Call, kind: str) -> tuple[str, str, str]:
    """Return status, code and sentence, as the service words them."""
    if kind == "deny":
        who = f"arn:aws:iam::{settings.ACCOUNT}:user/{call.key}"
        if call.service == "ec2":
            return (
                "403 Forbidden",
                "UnauthorizedOperation",
                f"You are not authorized to perform this operation. User: {who} is not authorized "
                f"to perform: {call.name} because no identity-based policy allows the "
                f"{call.name} action",
            )
        if call.service == "s3":
            return "403 Forbidden", "AccessDenied", "Access Denied"
        words = f"User: {who} is not authorized to perform: {call.name} on resource: *"
        return "403 Forbidden", "AccessDenied", words
    if kind == "unknown":
        (name,) = unseen.names(call.form)[:1]
        return (
            "400 Bad Request",
            "InvalidInstanceID.NotFound",
            f"The instance ID '{name}' does not exist",
        )
    if kind == "throttle":
        code, status = {
            "ec2": ("RequestLimitExceeded", "503 Service Unavailable"),
            "s3": ("SlowDown", "503 Slow Down"),
        }.get(call.service, ("Throttling", "400 Bad Request"))
        return status, code, _WORDS[kind]
    code = "InternalError" if call.service in ("ec2", "s3") else "InternalFailure"
    return "500 Internal Server Error", code, _WORDS["error"]
