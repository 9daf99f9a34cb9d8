"""What may stand in the URL of a store in S3, and what has to be installed for one."""

from __future__ import annotations

import difflib
import importlib.util

from spotguard.errors import MissingExtra, UsageError
from spotguard.storage.urls import is_server

_SETTINGS = ("endpoint", "region")


def checked_settings(given: dict[str, str], place: str) -> dict[str, str]:
    """Return the settings of a store's URL; raises `UsageError` if they make no sense."""
    for name, value in given.items():
        if name not in _SETTINGS:
            close = difflib.get_close_matches(name, _SETTINGS, n=1)
            raise UsageError(
                f"store {place!r} has no setting {name!r}",
                hint=f"did you mean {close[0]}?" if close else f"it has {' and '.join(_SETTINGS)}",
            )
        if name == "endpoint":
            _check_endpoint(value, place)
    return given


def _check_endpoint(endpoint: str, place: str) -> None:
    if "@" in endpoint:  # also where no scheme says what is before it
        raise UsageError(
            f"store {place!r}: the endpoint holds a login, and URLs are shown and kept",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead",
        )
    if not is_server(endpoint):
        raise UsageError(
            f"store {place!r}: the endpoint {endpoint!r} is no http:// or https:// URL",
            hint=f"s3://BUCKET/PREFIX?endpoint=https://{endpoint.rpartition('//')[2] or 'HOST'}",
        )


def need_boto3() -> None:
    """Raise `MissingExtra` unless what S3 needs is installed; nothing is imported."""
    if not all(map(importlib.util.find_spec, ("boto3", "crc32c"))):
        raise MissingExtra(
            "stores at s3:// need boto3 and crc32c, which are not installed",
            hint="pip install 'spotguard[aws]'",
        )
