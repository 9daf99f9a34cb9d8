"""Who S3 will take us for: botocore's own search for credentials, and what STS says of them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from spotguard.errors import MissingExtra
from spotguard.storage.credentials import Identity
from spotguard.storage.http.private_random import draw_privately
from spotguard.storage.s3.errors import UNUSABLE, Asked, from_botocore, from_role, unusable

if TYPE_CHECKING:
    from boto3.session import Session

_ASK_WITHIN_S = 5.0
_SOURCES = {
    "env": "AWS_ACCESS_KEY_ID",
    "shared-credentials-file": "the profile {profile} in ~/.aws/credentials",
    "config-file": "the profile {profile} in ~/.aws/config",
    "sso": "the profile {profile} and aws sso login",
    "login": "the profile {profile} and aws login",
    "assume-role": "the role of the profile {profile}",
    "assume-role-with-web-identity": "AWS_WEB_IDENTITY_TOKEN_FILE",
    "custom-process": "the credential_process of the profile {profile}",
    "iam-role": "this machine's role",
    "container-role": "this container's role",
}


def s3_identity(url: str) -> Identity:
    """Return the credentials for a bucket; of S3 itself, also whose they are."""
    try:
        from boto3.session import Session
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
    except ImportError:
        raise MissingExtra(
            "stores at s3:// need boto3, which is not installed",
            hint="pip install 'spotguard[aws]'",
        ) from None
    draw_privately("boto3")
    place, _, query = url.partition("?")
    bucket, _, prefix = place.partition("://")[2].partition("/")
    asked = Asked(right="sts:GetCallerIdentity", bucket=bucket, prefix=prefix)
    try:
        session = Session()
        found = session.get_credentials()
        if found is None:
            raise NoCredentialsError
        found.get_frozen_credentials()  # a role's are fetched now
    except BotoCoreError as problem:
        raise from_botocore(problem, asked) from None
    except ClientError as problem:  # of who gives a role's
        raise from_role(problem.response, asked) from None
    except UNUSABLE as problem:
        raise unusable(problem, asked) from None
    source = _SOURCES.get(found.method, found.method).format(profile=session.profile_name)
    of_aws = "endpoint" not in dict(parse_qsl(query)) and not _other_server()
    return Identity(source=source, who=_arn(session) if of_aws else None)


def _other_server() -> bool:
    return any(os.environ.get(f"AWS_ENDPOINT_URL{service}") for service in ("", "_S3"))


def _arn(session: Session) -> str | None:
    """Return what STS calls us, which needs no right; None if it cannot be asked."""
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    config = Config(
        connect_timeout=_ASK_WITHIN_S, read_timeout=_ASK_WITHIN_S, retries={"total_max_attempts": 1}
    )
    region = session.region_name or "us-east-1"
    try:
        client = session.client("sts", region_name=region, config=config)
        return str(client.get_caller_identity()["Arn"])
    except (BotoCoreError, ClientError):
        return None  # the store's own refusal says more
