"""What S3 and botocore say when something fails, as the store's own errors with a way out.

Two tables, each entry (class, what is true, what to do). A message names codes, rights and places;
what the server said in its own words is left out unless nothing else is known.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from spotguard.errors import AlreadyExists, NotFound, StoreError, StoreFull, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from botocore.exceptions import ClientError


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked for: all that a message may tell."""

    right: str
    """Which permission it needs, as IAM names it."""
    bucket: str
    prefix: str
    key: str = ""
    if_match: bool = False
    """Whether it was to replace one version: then none at all is another one, too."""
    secrets: Iterable[str] = ()
    """What must not be repeated, should the server say it."""

    @property
    def where(self) -> str:
        """The object, or the place."""
        return f"s3://{self.bucket}/{self.prefix}{self.key}"

    @property
    def resource(self) -> str:
        """What a policy has to name."""
        if self.right.startswith("s3:List"):
            return f"arn:aws:s3:::{self.bucket}"
        return f"arn:aws:s3:::{self.bucket}/{self.prefix}*"


class _Meaning(NamedTuple):
    error: type[StoreError]
    what: str
    hint: str = ""


_SIGNATURE = re.compile(r"[0-9A-Fa-f]{32,}")
_MOST_WORDS = 300

_AGAIN = "it is tried again; if this goes on, look at the service's status"
_RENEW = "renew the credentials, e.g. aws sso login, and see which are used: aws configure list"
_SETTINGS = "correct it in the environment or in ~/.aws/config (aws configure list shows it)"
_OURS = "update boto3 and spotguard; if it stays, please report it"

_GONE = _Meaning(NotFound, "there is no {where}")
_NO_UPLOAD = _Meaning(NotFound, "the write of {where} in parts is no more")
_TAKEN = _Meaning(AlreadyExists, "{where} was written by another writer first")
_DENIED = _Meaning(
    StoreError,
    "these credentials may not do {right} on {where}",
    "allow {right} on {resource}; without s3:ListBucket S3 says the same of an object that is not "
    "there; a bucket with a KMS key also needs kms:GenerateDataKey and kms:Decrypt",
)
_REGION = _Meaning(
    StoreError,
    "bucket {bucket} is in the region {region}",
    "set it: s3://{bucket}/...?region={region}, or AWS_DEFAULT_REGION",
)
_EXPIRED = _Meaning(StoreError, "the credentials for {where} have expired", _RENEW)
_WRONG_ID = _Meaning(
    StoreError, "the store does not know the access key or session token for {where}", _RENEW
)
_WRONG_SECRET = _Meaning(
    StoreError,
    "the secret key for {where} does not fit its access key",
    "set AWS_SECRET_ACCESS_KEY to the one that belongs to AWS_ACCESS_KEY_ID (a proxy that changes "
    "requests looks the same)",
)
_CLOCK = _Meaning(
    StoreError,
    "this machine's clock is more than 15 minutes off, so {where} refuses its signatures",
    "set the clock (timedatectl set-ntp true)",
)
_BUSY = _Meaning(StoreUnavailable, "{where} is too busy or cannot answer now ({code})", _AGAIN)
_DAMAGED = _Meaning(StoreUnavailable, "bytes of {where} were damaged on their way ({code})", _AGAIN)
_KMS = _Meaning(
    StoreError,
    "the KMS key for {where} cannot be used ({code})",
    "check SPOTGUARD_S3_SSE_KMS_KEY_ID, that the key is enabled, in the bucket's region, and that "
    "these credentials may use it",
)
_FULL = _Meaning(StoreFull, "no room left for {where} ({code})", "free space, or raise the quota")
_NO_BUCKET = _Meaning(
    StoreError,
    "there is no bucket {bucket}",
    "create it (aws s3 mb s3://{bucket}), or correct the name or the endpoint",
)
_ARCHIVED = _Meaning(
    StoreError,
    "{where} is archived",
    "bring it back first (aws s3api restore-object), which takes hours",
)
_LACKS = _Meaning(StoreError, "the store at {where} cannot do {right} ({code})", "use another one")
_SHORT = _Meaning(StoreError, "{where} ends before the bytes that were asked for")
_PARTS = _Meaning(StoreError, "the store has other parts of {where} than were sent ({code})", _OURS)

_CODES: dict[str, _Meaning] = {
    **dict.fromkeys(("NoSuchKey", "NoSuchVersion", "404"), _GONE),
    **dict.fromkeys(("PreconditionFailed", "412"), _TAKEN),
    **dict.fromkeys(("AccessDenied", "AllAccessDisabled", "AccountProblem", "403"), _DENIED),
    **dict.fromkeys(("PermanentRedirect", "AuthorizationHeaderMalformed", "301", "400"), _REGION),
    **dict.fromkeys(("IllegalLocationConstraintException", "IncorrectEndpoint"), _REGION),
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"), _EXPIRED),
    **dict.fromkeys(("InvalidAccessKeyId", "InvalidToken", "InvalidClientTokenId"), _WRONG_ID),
    **dict.fromkeys(("SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout"), _BUSY),
    **dict.fromkeys(("ConditionalRequestConflict", "OperationAborted", "409"), _BUSY),
    **dict.fromkeys(("Throttling", "ThrottlingException", "TooManyRequests"), _BUSY),
    **dict.fromkeys(("RequestThrottled", "TemporaryRedirect", "Busy", "429"), _BUSY),
    **dict.fromkeys(("KMS.ThrottlingException", "KMS.KMSInternalException"), _BUSY),
    **dict.fromkeys(("BadDigest", "XAmzContentChecksumMismatch", "IncompleteBody"), _DAMAGED),
    **dict.fromkeys(("XAmzContentSHA256Mismatch", "ContentSHA256Mismatch"), _DAMAGED),
    **dict.fromkeys(("KMS.DisabledException", "KMS.NotFoundException"), _KMS),
    **dict.fromkeys(("KMS.KMSInvalidStateException", "KMS.InvalidStateException"), _KMS),
    **dict.fromkeys(("XMinioStorageFull", "InsufficientStorage", "QuotaExceeded"), _FULL),
    **dict.fromkeys(("NotImplemented", "MethodNotAllowed", "InvalidStorageClass"), _LACKS),
    **dict.fromkeys(("InvalidRange", "416"), _SHORT),
    **dict.fromkeys(("InvalidPart", "InvalidPartOrder"), _PARTS),
    "NoSuchUpload": _NO_UPLOAD,
    "NoSuchBucket": _NO_BUCKET,
    "InvalidBucketName": _NO_BUCKET,
    "SignatureDoesNotMatch": _WRONG_SECRET,
    "RequestTimeTooSkewed": _CLOCK,
    "RequestExpired": _CLOCK,
    "InvalidObjectState": _ARCHIVED,
    "ObjectNotInActiveTierError": _ARCHIVED,
}

_NO_CREDENTIALS = _Meaning(
    StoreError,
    "there are no usable credentials for {where} ({code})",
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or run on a machine with a role",
)
_UNREACHED = _Meaning(
    StoreUnavailable,
    "{where} cannot be reached ({code})",
    "check the network, the endpoint and the region; what was committed is untouched",
)
_NO_ROLE = _Meaning(
    StoreUnavailable,
    "the credentials for {where} could not be fetched ({code})",
    "check the machine's role and its metadata service, or the program in credential_process",
)
_ROLE_REFUSED = _Meaning(
    StoreError,
    _NO_ROLE.what,
    "renew the login that the role is assumed with, and see that the role trusts it: "
    "aws sts get-caller-identity",
)
_UNUSABLE = _Meaning(
    StoreError, "the credentials for {where} cannot be used ({code})", "look at: aws configure list"
)
_TLS = _Meaning(
    StoreError,
    "the server of {where} cannot prove who it is",
    "check the endpoint; for a certificate of your own set AWS_CA_BUNDLE to its file",
)
_MISSET = _Meaning(StoreError, "botocore's settings for {where} make no sense ({code})", _SETTINGS)
_BUG = _Meaning(StoreError, "botocore refused what it was asked about {where} ({code})", _OURS)


def _all(names: str, meaning: _Meaning) -> dict[str, _Meaning]:
    return dict.fromkeys(names.split(), meaning)


_CLASSES: dict[str, _Meaning] = {
    **_all(
        """ConnectionError EndpointConnectionError ConnectTimeoutError ReadTimeoutError
        ConnectionClosedError ProxyConnectionError HTTPClientError ResponseStreamingError
        CapacityNotAvailableError""",
        _UNREACHED,
    ),
    **_all("IncompleteReadError ChecksumError FlexibleChecksumError EventStreamError", _DAMAGED),
    **_all(
        """CredentialRetrievalError MetadataRetrievalError InvalidIMDSEndpointError
        InvalidIMDSEndpointModeError""",
        _NO_ROLE,
    ),
    **_all("SSLError", _TLS),
    **_all(
        """NoCredentialsError PartialCredentialsError UnknownCredentialError NoAuthTokenError
        RefreshWithMFAUnsupportedError TokenRetrievalError UnknownTokenProviderError""",
        _NO_CREDENTIALS,
    ),
    **_all(
        """SSOError SSOTokenLoadError UnauthorizedSSOTokenError LoginError LoginTokenLoadError
        LoginRefreshRequired LoginAuthorizationCodeError LoginInsufficientPermissions""",
        _EXPIRED,
    ),
    **_all(
        """ConfigNotFound ConfigParseError ProfileNotFound NoRegionError InvalidRegionError
        UnknownRegionError InvalidConfigError InvalidChecksumConfigError InvalidDNSNameError
        InvalidDefaultsMode InvalidEndpointConfigurationError EndpointVariantError
        InvalidEndpointDiscoveryConfigurationError InvalidMaxRetryAttemptsError
        InvalidProxiesConfigError InvalidRetryConfigurationError InvalidRetryModeError
        InvalidS3AddressingStyleError InvalidS3UsEast1RegionalEndpointConfigError
        InvalidSTSRegionalEndpointsConfigError InfiniteLoopConfigError EndpointProviderError
        EndpointResolutionError BaseEndpointResolverError UnknownEndpointError
        UnknownEndpointResolutionBuiltInName UnknownFIPSEndpointError ServiceNotInRegionError
        UnsupportedOutpostResourceError UnsupportedS3AccesspointConfigurationError
        UnsupportedS3ArnError UnsupportedS3ConfigurationError UnsupportedS3ControlArnError
        UnsupportedS3ControlConfigurationError UnsupportedSignatureVersionError
        UnknownSignatureVersionError UnsupportedTLSVersionWarning InvalidHostLabelError
        MissingDependencyException MD5UnavailableError""",
        _MISSET,
    ),
    **_all(
        """BotoCoreError AliasConflictParameterError ApiVersionNotFoundError AwsChunkedWrapperError
        DataNotFoundError ImminentRemovalWarning InvalidExpressionError MissingParametersError
        MissingServiceIdError OperationNotPageableError PaginationError ParamValidationError
        RangeError StubAssertionError StubResponseError UnStubbedResponseError
        UndefinedModelAttributeError UnknownClientMethodError UnknownKeyError
        UnknownParameterError UnknownServiceError UnknownServiceStyle UnseekableStreamError
        UnsupportedServiceProtocolsError ValidationError WaiterConfigError WaiterError""",
        _BUG,
    ),
}


UNUSABLE = (OSError, ValueError, AttributeError)
"""What botocore lets through of a program or a file that gives credentials and is ill."""

_GIVE_CREDENTIALS = (
    "AssumeRole",
    "AssumeRoleWithWebIdentity",
    "GetRoleCredentials",
    "CreateToken",
)
"""What botocore itself asks, in the middle of any request, of the services that give them."""


def is_known(kind: type[BaseException]) -> bool:
    """Return whether a class of botocore's has an entry of its own."""
    return kind.__name__ in _CLASSES


def is_about_credentials(answer: Any) -> bool:
    """Return whether other credentials may be all that is missing.

    The answer to a HEAD has no body to say so: it is a 400, as for every expired token.
    """
    code = str(answer.get("Error", {}).get("Code", ""))
    return code == "400" or _CODES.get(code) in (_EXPIRED, _WRONG_ID)


def is_denial(answer: Any) -> bool:
    """Tell whether the server says that a right is missing."""
    return _CODES.get(_code_and_status(answer)[0]) is _DENIED


def is_of_a_role(problem: ClientError) -> bool:
    """Return whether it was not S3 that refused, but who gives the credentials for it."""
    return problem.operation_name in _GIVE_CREDENTIALS


def from_role(answer: Any, asked: Asked) -> StoreError:
    """Return the error for credentials that were not given; worth another try if it passes."""
    code, status = _code_and_status(answer)
    passes = status >= 500 or status == 429 or _CODES.get(code) is _BUSY
    meaning = _NO_ROLE if passes else _ROLE_REFUSED
    return _error(meaning, asked, code=_without(code or str(status), asked.secrets))


def unusable(problem: BaseException, asked: Asked) -> StoreError:
    """Return the error for credentials of which botocore can make nothing; quotes none of them."""
    return _error(_UNUSABLE, asked, code=type(problem).__name__)


def from_answer(answer: Any, asked: Asked) -> StoreError:
    """Return the error for a refusal, from what `botocore`'s `ClientError.response` holds."""
    error, meta = answer.get("Error", {}), answer.get("ResponseMetadata", {})
    code, status = _code_and_status(answer)
    region = error.get("Region") or meta.get("HTTPHeaders", {}).get("x-amz-bucket-region", "")
    meaning = _CODES.get(code)  # an answer without a body has its status as the code
    if meaning is _REGION and not region:
        meaning = None
    if meaning is _GONE and asked.if_match:
        meaning = _TAKEN
    if meaning is None and (status >= 500 or status == 429):
        meaning = _BUSY
    if meaning is None:
        said = _without(f"{code or status}: {error.get('Message', '')}", asked.secrets)
        return StoreError(f"{asked.where} refuses {asked.right}: {said}", hint=_SETTINGS)
    return _error(meaning, asked, code=_without(code, asked.secrets), region=region)


def from_botocore(problem: BaseException, asked: Asked) -> StoreError:
    """Return the error for what `botocore` raised before it had an answer."""
    names = (kind.__name__ for kind in type(problem).__mro__)
    meaning = next((_CLASSES[name] for name in names if name in _CLASSES), _BUG)
    return _error(meaning, asked, code=type(problem).__name__)


def _code_and_status(answer: Any) -> tuple[str, int]:
    error, meta = answer.get("Error", {}), answer.get("ResponseMetadata", {})
    return str(error.get("Code", "")), meta.get("HTTPStatusCode", 0)


def _error(meaning: _Meaning, asked: Asked, **more: object) -> StoreError:
    told = {
        "right": asked.right,
        "bucket": asked.bucket,
        "where": asked.where,
        "resource": asked.resource,
        **more,
    }
    return meaning.error(meaning.what.format(**told), hint=meaning.hint.format(**told))


def _without(text: str, secrets: Iterable[str]) -> str:
    for secret in filter(None, secrets):
        text = text.replace(secret, "[hidden]")
    return _SIGNATURE.sub("[hidden]", text)[:_MOST_WORDS]
