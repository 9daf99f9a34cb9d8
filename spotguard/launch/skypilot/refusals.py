"""Why a launch came to nothing, in the cloud's own words, and whether waiting can help.

SkyPilot raises one and the same error for nodes that are not to be had now and for rights, images,
quotas and networks that no wait will mend. What the cloud said stands in the error's history of
failovers, where SkyPilot understood it, and always in the log of the request.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_WORDS_CHARS = 400
_AWS_ERROR = re.compile(
    r"An error occurred \((\S+?)\) when calling the (\w+) operation(?: \([^)]*\))?: (.*)"
)
_BOTO_ERROR = re.compile(
    r"Boto3 error: \{.*?'Code': '(\S+?)', 'Message': ([\"'])(.*?)\2\}.*'operation_name': '(\w+)'"
)
_ERROR_CODE = re.compile(r"Error code: ([\w.]+)")
"""How SkyPilot's AWS code tells what it could not do before it asked for nodes."""
_NO_VERDICT = frozenset({"None", "DryRunOperation"})
_CAPACITY = (
    *("InsufficientInstanceCapacity", "InsufficientHostCapacity", "InsufficientCapacity"),
    *("InsufficientReservedInstanceCapacity", "SpotMaxPriceTooLow", "ZONE_RESOURCE_POOL_EXHAUSTED"),
    *("InsufficientFreeAddressesInSubnet", "InsufficientVolumeCapacity", "PendingVerification"),
    *("ReservationCapacityExceeded",),
    *("does not have enough resources", "no more capacity", "Insufficient reserved capacity"),
    *("SkuNotAvailable", "AllocationFailed", "OverconstrainedAllocationRequest"),
    *("OverconstrainedZonalAllocationRequest", "insufficient resources", "RESOURCE_NOT_FOUND"),
    *(
        "did not get nodes allocated",
        "Insufficient cpu",
        "Insufficient memory",
        "Insufficient nvidia",
    ),
)
"""What clouds say when the nodes are not to be had now."""
_BUSY = (
    *("RequestLimitExceeded", "Throttling", "RequestThrottled", "ServiceUnavailable"),
    *("InternalError", "InternalFailure", "RATE_EXCEEDED", "RESOURCE_NOT_READY"),
    *("rateLimitExceeded", "RATE_LIMIT_EXCEEDED", "toomanyrequests", "subnets are pending"),
    # Two launches in a fresh region: SkyPilot looks for its network and its role, and makes them
    # if they are not there. One is told that they are there now, or sees them half made.
    *("InvalidPermission.Duplicate", "InvalidGroup.Duplicate", "InvalidKeyPair.Duplicate"),
    *("EntityAlreadyExists", "ConcurrentModification", "iamInstanceProfile.arn"),
    *("LimitExceeded (AddRoleToInstanceProfile)", "NoSuchEntity (AddRoleToInstanceProfile)"),
    *("NoSuchEntity (AttachRolePolicy)", "NoSuchEntity (PutRolePolicy)"),
    # EC2 does not know for a moment what it has just made.
    *("InvalidInstanceID.NotFound", "InvalidGroup.NotFound", "InvalidNetworkInterfaceID.NotFound"),
)
"""What clouds say when they are busy, or not yet done with what they were asked before: it is worth
to ask again."""
_SERVER_FAULT = re.compile(
    r"5\d\d|(?:Service)?Unavailable|Internal(?:Error|Failure)|ServerInternal|ServiceFailure"
    r"|RequestTimeout|TooManyRequestsException"
)
"""Codes of AWS that say the same. Whole codes, for as parts of sentences they say too little; the
SDK takes the HTTP status for the code of an answer that is none of AWS's own."""
_AWAY = (
    *("Could not connect to the endpoint", "Name or service not known", "SSLError"),
    *("Failed to establish a new connection", "NameResolutionError"),
)
"""What this machine says when it does not reach the cloud."""
_QUOTA_FULL = (
    *("VcpuLimitExceeded", "InstanceLimitExceeded", "MaxSpotInstanceCountExceeded"),
    *("quotaExceeded", "QUOTA_EXCEEDED", "QuotaFailure", "exceeded quota", "exceeding approved"),
)
"""What clouds say of a quota that is used up, or zero. Nodes count until a cloud has closed their
books, which is some time after they have ended. SkyPilot's "Found no quota" is of a zero one only.
"""
_LASTING = (
    *("UnauthorizedOperation", "AccessDenied", "AuthFailure", "InvalidClientTokenId"),
    *("ExpiredToken", "RequestExpired", "OptInRequired", "IAM_PERMISSION_DENIED", "access denied"),
    *("PermissionDenied", "permission denied", "AuthorizationFailed", "ClientAuthenticationError"),
    *("ReadOnlyDisabledSubscription", "access is unauthorized", "not authorized", "Forbidden"),
    *("invalid cloud credentials", "InvalidCloudCredentials", "invalid cloud config"),
    *("InvalidAMIID", "image not found", "ImageNotFound", "ErrImagePull", "ImagePullBackOff"),
    *("InvalidImageName", "disk size cannot be smaller", "PlatformImageNotFound"),
    *("LimitExceeded", "Found no quota"),
    *("VPC_NOT_FOUND", "SUBNET_NOT_FOUND", "InvalidSubnet", "InvalidVpcID", "InvalidGroup"),
    *("No default VPC", "No VPC with name", "No subnets found", "no usable subnets"),
    *("SKYPILOT_ERROR_NO_NODES_LAUNCHED", "Reason: Unauthorized", "denied the request"),
    *("SERVICE_DISABLED", "accessNotConfigured", "before or it is disabled", "invalid_grant"),
    *("Reauthentication is needed", *_AWAY),
)
"""What clouds say when a right, an image, a network, or a whole quota is missing."""
_LASTING_ERRORS = frozenset(
    {
        *("ProvisionUnsupportedError", "InvalidCloudConfigs", "InvalidCloudCredentials"),
        *("NotSupportedError", "CloudUserIdentityError", "InvalidClusterNameError"),
        *("NoCloudAccessError", "KubernetesValidationError"),
    }
)
"""SkyPilot's own errors, by name, of what no wait will mend."""
_BEFORE_NODES = re.compile(
    r"RunInstances|Get\w+|List\w+|\w*(?:SecurityGroup|InstanceProfile|Role|KeyPair)\w*"
    r"|Describe(?!Instances$|InstanceStatus$)\w+"
)
"""AWS's calls before nodes run, and the one that gives all nodes or none."""
_NEVER_ASKED = ("SKYPILOT_ERROR_NO_NODES_LAUNCHED", "NoClusterLaunchedError")
_QUEUED = re.compile(r"Failed to acquire resources in .{0,200} for \{(?:Slurm|Kubernetes)\(")
"""A scheduler that kept a launch in its queue has given it nothing, and SkyPilot says no more."""
_SET_UP = re.compile(
    r"Failed to (?:set up SkyPilot runtime|SSH to|run setup commands|start ray|start skylet)\b"
    r"|Could not find any head instance"
)
"""What SkyPilot says when nodes that it had were lost, or out of reach, while it set them up."""
_NODES_UP = re.compile(
    r"\b(?:Instance is|Instances are|Pod is|Pods are) up\b|Failed to wait for instances"
    r"|number of running instances is different|=== Slurm job logs|stuck on the same condition"
    r"|has not started running|terminated with error while pod"
)
"""What SkyPilot prints once it has some nodes of a cluster."""
_HARMLESS = "Proceeding assuming"
"""SkyPilot could not ask for the quota, and went on."""
_PREFIX = re.compile(r"^[DIWECF] \d\d-\d\d .*?\] ")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why a launch came to nothing."""

    words: str
    """The cloud's own; empty if it said nothing that is understood."""
    lasting: bool = False
    """True if no wait will mend it."""
    broke_off: bool = False
    """True if nodes were there, and were lost or out of reach while they were set up."""
    busy: bool = False
    """True if it is worth to ask again at once, and nothing was said of capacity."""
    quota_full: bool = False
    """True if a quota of the account is full: `lasting`, unless it is so only for a moment."""
    nodes_ran: bool = False
    """True unless what was said proves that no node was started: then nothing was billed."""


def read_refusal(history: Iterable[BaseException], said: str) -> Refusal:
    """Return what is to be learned of a launch that came to nothing.

    One word of missing capacity is enough to wait, whatever else was said. Nodes that may have
    run count as run: a budget that is kept only if a cloud says so is none.

    Args:
        history: SkyPilot's error and what it had met before.
        said: what the request printed, and what its error says.
    """
    errors = list(history)
    told = "\n".join([said, *map(str, errors)]).splitlines()
    lines = [_PREFIX.sub("", line.strip()) for line in told if _HARMLESS not in line]
    if any(_SET_UP.search(line) for line in lines):
        return Refusal(words=_of_the_set_up(errors, lines), broke_off=True, nodes_ran=True)
    own = _by_code(lines)
    understood = _understood(own, lines, errors)
    return replace(understood, nodes_ran=_nodes_ran(lines, understood))


def _of_the_set_up(errors: list[BaseException], lines: list[str]) -> str:
    """Return the sentence that says why, and nothing that a node has printed."""
    first = [str(error).strip().partition("\n")[0].strip() for error in errors]
    found = next((line for line in [*first, *lines] if _SET_UP.search(line)), "")
    return found.removesuffix("Error:").strip()[:_WORDS_CHARS]


def _understood(own: dict[str, str], lines: list[str], errors: list[BaseException]) -> Refusal:
    for waits in (_CAPACITY, _BUSY):
        found = _first(own, lines, waits)
        if found:
            return Refusal(words=found, busy=waits is _BUSY)
    for code, sentence in own.items():
        if _SERVER_FAULT.fullmatch(code):
            return Refusal(words=sentence, busy=True)
    found = _first(own, lines, _QUOTA_FULL)
    if found:
        return Refusal(words=found, lasting=True, quota_full=True)
    named = next((error for error in errors if type(error).__name__ in _LASTING_ERRORS), None)
    if own:  # a code of AWS that is none of those above is not about capacity
        return Refusal(words=next(iter(own.values())), lasting=True)
    if named is not None:
        return Refusal(words=f"{type(named).__name__}: {named}"[:_WORDS_CHARS], lasting=True)
    found = _first(own, lines, _LASTING)
    return Refusal(words=found, lasting=bool(found))


def _nodes_ran(lines: list[str], understood: Refusal) -> bool:
    """Tell whether nodes may have run: they did, or nothing that was said rules it out."""
    text = "\n".join(lines)
    errors = _aws_errors(lines)
    calls = {asked for _, asked, _ in errors}
    if any(asked == "RunInstances" and _SERVER_FAULT.fullmatch(code) for code, asked, _ in errors):
        return True  # EC2 may have launched them before it failed
    if _NODES_UP.search(text) or not all(map(_BEFORE_NODES.fullmatch, calls)):
        return True
    if any(word in text for word in _NEVER_ASKED) or _QUEUED.search(text):
        return False
    lost_touch = any(word in understood.words for word in _AWAY)
    return not understood.words or lost_touch or (understood.busy and not calls)


def _by_code(lines: list[str]) -> dict[str, str]:
    """Return the codes that AWS gave, each with its sentence."""
    own: dict[str, str] = {}
    for code, asked, sentence in _aws_errors(lines):
        words = sentence.partition("Encoded authorization failure message")[0].strip()
        own.setdefault(code, f"{code} ({asked}): {words}"[:_WORDS_CHARS])
    for code in _ERROR_CODE.findall("\n".join(lines)):  # where nothing more is said of it
        own.setdefault(code, code)
    return {code: words for code, words in own.items() if code not in _NO_VERDICT}


def _aws_errors(lines: list[str]) -> list[tuple[str, str, str]]:
    """Return what AWS refused: its code, the call, and its sentence."""
    found: list[tuple[str, str, str]] = []
    for line in lines:
        found += _AWS_ERROR.findall(line)
        found += [(code, asked, said) for code, _, said, asked in _BOTO_ERROR.findall(line)]
    return found


def _first(own: dict[str, str], lines: list[str], words: tuple[str, ...]) -> str:
    """Return the first sentence that has one of these words in it; empty if none has.

    Kubernetes tells its reason in a word first, and some lines later in a sentence.
    """
    for sentence in sorted((*own.values(), *lines), key=lambda line: line.startswith("Reason: ")):
        if any(word.lower() in sentence.lower() for word in words):
            return sentence[:_WORDS_CHARS]
    return ""
