"""What Azure Blob Storage means by its error codes, and what to do about it.

The codes are those of learn.microsoft.com/rest/api/storageservices/blob-service-error-codes. The
service's own sentences are left out of every message: some quote the signature of the request.
"""

from __future__ import annotations

import email.utils
import time
from typing import TYPE_CHECKING, Any

from spotguard.errors import AlreadyExists, NotFound, StoreError, StoreUnavailable
from spotguard.storage.http.sdk_bodies import broken

if TYPE_CHECKING:
    from azure.core.exceptions import AzureError

    from spotguard.storage.azure.access import AzurePlace
    from spotguard.storage.remote.bucket import Precondition

_SKEW_S = 300.0
_LOGIN_HINT = "run `az login`, give the machine an identity, or set AZURE_STORAGE_KEY"
_GIVE_ROLE = (
    "give the identity the role Storage Blob Data Contributor on the container: az role assignment "
    "create --role 'Storage Blob Data Contributor' --assignee WHO --scope CONTAINER_ID"
)
_HINTS = {
    "ContainerNotFound": "create it: az storage container create --name {container} "
    "--account-name {account} --auth-mode login",
    "ContainerDisabled": "the container is disabled; enable it in the portal",
    "AccountIsDisabled": "the storage account is disabled; enable it, or pay its bill",
    "AuthenticationFailed": "the key, SAS or token is wrong or has expired, or belongs to another "
    "account than {account}; run `az login` again or renew AZURE_STORAGE_KEY / _SAS_TOKEN",
    "InvalidAuthenticationInfo": "the token has expired or is of another tenant; run `az login`",
    "NoAuthenticationInformation": "run `az login`, or set AZURE_STORAGE_KEY",
    "AuthorizationFailure": "the account's firewall refuses this network, or the SAS allows less "
    "than reading, writing, listing and deleting (sp=rwdl)",
    "AuthorizationSourceIPMismatch": "the SAS is for other addresses (sip) than this machine's",
    "AuthorizationProtocolMismatch": "the SAS is for https only; use an https endpoint",
    "AuthorizationResourceTypeMismatch": "the SAS needs srt=co: containers and objects",
    "AuthorizationServiceMismatch": "the SAS needs ss=b: the blob service",
    "AuthorizationPermissionMismatch": _GIVE_ROLE + " (an SAS needs sp=rwdl)",
    "InsufficientAccountPermissions": _GIVE_ROLE,
    "KeyBasedAuthenticationNotPermitted": "the account refuses keys: unset AZURE_STORAGE_KEY and "
    "AZURE_STORAGE_CONNECTION_STRING, run `az login`; then " + _GIVE_ROLE,
    "PublicAccessNotPermitted": "run `az login`, or set AZURE_STORAGE_KEY",
    "InvalidResourceName": "a container's name is 3-63 small letters, digits and single dashes",
    "BlobArchived": "the blob was archived: az storage blob set-tier --tier Hot, then wait hours",
    "CannotVerifyCopySource": "the SAS must allow to read (sp=r)",
    "BlobImmutableDueToPolicy": "the container's retention policy forbids to change or delete it",
    "LeaseIdMissing": "somebody holds a lease on the blob: az storage blob lease break",
    "InvalidBlobType": "there is a page or append blob of this name; choose another prefix",
    "InvalidBlobOrBlock": "another program left unfinished blocks of this name; they vanish "
    "after a week, or choose another prefix",
    "BlobAccessTierNotSupportedForAccountType": "this account has no archive tier",
    "FeatureNotSupportedForAccount": "this kind of account cannot do it; use a StorageV2 account",
}
"""What to do about an error that another try does not mend."""

_TAKEN = frozenset({"BlobAlreadyExists", "ConditionNotMet", "TargetConditionNotMet"})
_ABSENT = frozenset({"BlobNotFound", "ResourceNotFound", "CannotVerifyCopySource"})
"""With status 404: there is no such blob, but there is the container."""
_PASSING = frozenset(
    {"Md5Mismatch", "ContainerBeingDeleted", "AccountBeingCreated", "PendingCopyOperation"}
)
_BROKEN = frozenset(
    {
        *("ServiceRequestError", "ServiceRequestTimeoutError", "ServiceResponseError"),
        *("ServiceResponseTimeoutError", "IncompleteReadError", "DecodeError"),
        "HttpResponseError",
    }
)
"""Of azure.core's exceptions, those of a connection; the last two if there is no status."""


def problem_of(
    problem: Exception, name: str, condition: Precondition, place: AzurePlace
) -> StoreError:
    """Return what it means that a request for `name` ended in `problem`."""
    status = getattr(problem, "status_code", None)
    if status is None or status < 300:
        return _unanswered(problem, name, place)
    code = _code_of(problem)
    if code in _TAKEN:
        return _lost(name, condition)
    if code == "InvalidBlockList":  # the upload was finished, or another one of the same key
        return NotFound(f"there is no such upload of {name}")
    if status == 404 and (code in _ABSENT or not code):
        if condition.if_match is not None:
            return _lost(name, condition)
        return NotFound(f"there is no {name}")
    if status == 416:
        return StoreError(f"{name} ends before what was asked for")
    said = f"{name}: Azure answered {status} {code}".rstrip()
    if status in (408, 429) or status >= 500 or code in _PASSING:
        return StoreUnavailable(said)
    return StoreError(said, hint=_hint(problem, status, code, place))


def _unanswered(problem: Exception, name: str, place: AzurePlace) -> StoreError:
    kind = type(problem).__name__
    if kind == "AzureSigningError":
        return StoreError(
            f"the key of the storage account {place.account} is not base64",
            hint=f"copy it whole: az storage account keys list --account-name {place.account}",
        )
    if isinstance(problem, OSError) or kind in _BROKEN:
        return broken(problem, place.host)
    if isinstance(problem, ValueError):  # of the client's, about headers that are missing
        return StoreUnavailable(f"{place.host} answered what makes no sense")
    return StoreError(f"{name}: Azure's client gave up ({kind})")


def no_token(problem: AzureError | ValueError) -> StoreError:
    """Return why there is no token; what azure.identity says runs over pages, and may quote one."""
    status = getattr(problem, "status_code", None)
    if isinstance(status, int) and (status == 429 or status >= 500):
        return StoreUnavailable(f"Azure's token service answered {status}")
    if status is None and type(problem).__name__ in _BROKEN:
        return StoreUnavailable("Azure's token service does not answer")
    return StoreError(
        f"no credentials for Azure Blob Storage ({type(problem).__name__})", hint=_LOGIN_HINT
    )


def _code_of(problem: Exception) -> str:
    """Return the service's word for what is wrong; empty if it said none."""
    code = getattr(problem, "error_code", None)
    word = str(getattr(code, "value", code) or "")
    return word if word.isalnum() else ""


def _hint(problem: Any, status: int, code: str, place: AzurePlace) -> str:
    date = problem.response.headers.get("date") if problem.response else None
    skew_s = abs(_seconds_of(date) - time.time()) if date else 0.0
    if status == 403 and skew_s > _SKEW_S:
        return f"this machine's clock is {skew_s:.0f} s off; set it (timedatectl, chronyc)"
    hint = _HINTS.get(code) or (_GIVE_ROLE if status in (401, 403) else "")
    return hint.format(container=place.container, account=place.account)


def _seconds_of(date: str) -> float:
    try:
        return email.utils.parsedate_to_datetime(date).timestamp()
    except ValueError:
        return time.time()


def _lost(name: str, condition: Precondition) -> AlreadyExists:
    if condition.if_match is None:
        return AlreadyExists(f"{name} exists already")
    return AlreadyExists(f"{name} was changed by another writer")
