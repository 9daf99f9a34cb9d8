"""What Google Cloud Storage means by its answers, and what to do about it.

The words are the `reason` of cloud.google.com/storage/docs/json_api/v1/status-codes. Of the
service's own sentences only the name of a missing permission gets into a message.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

from spotguard.errors import AlreadyExists, NotFound, StoreError, StoreUnavailable
from spotguard.storage.http.sdk_bodies import broken

if TYPE_CHECKING:
    from google.auth.exceptions import GoogleAuthError

    from spotguard.storage.remote.bucket import Precondition

_GIVE_ROLE = (
    "give the identity the role Storage Object User: gcloud storage buckets "
    "add-iam-policy-binding gs://{bucket} --member=WHO --role=roles/storage.objectUser"
)
_NO_BUCKET = "create it: gcloud storage buckets create gs://{bucket} --location=REGION"
_LOGIN = "run `gcloud auth application-default login`; the credentials have expired or are missing"
_KMS = (
    "the project's storage service agent needs roles/cloudkms.cryptoKeyEncrypterDecrypter on the "
    "key (SPOTGUARD_GCS_KMS_KEY), which must be enabled and in the bucket's location"
)
_HINTS = {
    "accountDisabled": "the project's billing is off: gcloud billing projects link",
    "userProjectAccountProblem": "the project's billing is off: gcloud billing projects link",
    "userProjectMissing": "the bucket's requester pays: set GOOGLE_CLOUD_QUOTA_PROJECT",
    "accessNotConfigured": "enable the service: gcloud services enable storage.googleapis.com",
    "vpcServiceControls": "a VPC Service Controls perimeter refuses this network",
    "insufficientPermissions": "the machine's access scope is too small: create it with "
    "--scopes=storage-rw (or cloud-platform)",
    "retentionPolicyNotMet": "the bucket's retention policy forbids to change or delete it yet",
    "objectUnderActiveHold": "somebody put a hold on the object: gcloud storage objects update",
    "keyTooLong": "object names end at 1024 bytes, prefix included; choose a shorter prefix",
}
"""What to do about an error that another try does not mend."""

_LOGIN_HINT = (
    "run `gcloud auth application-default login`, give the machine a service account, "
    "or set GOOGLE_APPLICATION_CREDENTIALS to a key file"
)
_NO_ANSWER = frozenset({"TransportError", "ResponseError", "TimeoutError"})
"""Of google.auth's exceptions, those of a connection."""

_PASSING = frozenset(
    {"rateLimitExceeded", "userRateLimitExceeded", "backendError", "internalError", "conflict"}
)


def problem_of(problem: Any, name: str, condition: Precondition, bucket: str) -> StoreError:
    """Return what it means that a request for `name` ended in `problem`."""
    from google.api_core.exceptions import GoogleAPICallError
    from google.auth.exceptions import GoogleAuthError

    if isinstance(problem, GoogleAPICallError) and problem.code:
        reason, message = _said(problem.response)
        return _refusal(int(problem.code), reason, message, name, condition, bucket)
    if isinstance(problem, GoogleAuthError):
        return no_token(problem)
    if isinstance(problem, OSError) or type(problem).__module__.startswith("urllib3"):
        return broken(problem, "Google Cloud Storage")
    if isinstance(problem, ValueError):  # of the client's, about what is missing in an answer
        return StoreUnavailable(f"{name}: Google answered what makes no sense")
    return StoreError(f"{name}: Google's client gave up ({type(problem).__name__})")


def _refusal(
    status: int, reason: str, message: str, name: str, condition: Precondition, bucket: str
) -> StoreError:
    said = f"{name}: Google answered {status} {reason}".rstrip()
    if status == 412:
        return lost(name, condition)
    if status == 404 and "bucket does not exist" not in message:
        return NotFound(f"there is no {name}")
    if status == 416:
        return StoreError(f"{name} ends before what was asked for")
    if status == 400 and "crc32c" in message.lower():
        return StoreUnavailable(f"the bytes of {name} were damaged on their way")
    if status in (408, 429) or status >= 500 or reason in _PASSING:
        return StoreUnavailable(said)
    permission = re.search(r"\bstorage\.[a-z]+\.[a-zA-Z]+\b", message)
    said += f" (missing {permission[0]})" if status == 403 and permission else ""
    return StoreError(said, hint=_hint(status, reason, message).format(bucket=bucket))


def no_token(problem: GoogleAuthError) -> StoreError:
    """Return why there is no token; what google.auth says may quote an answer with one in it."""
    name = type(problem).__name__
    if problem.retryable or name in _NO_ANSWER:
        return StoreUnavailable(f"Google's token service does not answer ({name})")
    word = "have expired or were revoked" if name == "RefreshError" else "were not found"
    return StoreError(f"credentials for Google Cloud Storage {word} ({name})", hint=_LOGIN_HINT)


def _said(response: Any) -> tuple[str, str]:
    """Return the answer's reason, a single word, and its message."""
    with contextlib.suppress(ValueError, KeyError, TypeError, IndexError, AttributeError):
        error = response.json()["error"]
        reason = str((error.get("errors") or [{}])[0].get("reason", ""))
        return reason if reason.isalnum() else "", str(error.get("message", ""))
    return "", str(getattr(response, "text", ""))[:500]


def _hint(status: int, reason: str, message: str) -> str:
    if status == 404:
        return _NO_BUCKET
    if "kms" in message.lower():
        return _KMS
    if "organization's policy" in message:
        return _HINTS["vpcServiceControls"]
    if status == 401:
        return _LOGIN
    return _HINTS.get(reason) or (_GIVE_ROLE if status == 403 else "")


def lost(name: str, condition: Precondition) -> AlreadyExists:
    """Return that the condition of a write was not met."""
    if condition.if_match is None:
        return AlreadyExists(f"{name} exists already")
    return AlreadyExists(f"{name} was changed by another writer")
