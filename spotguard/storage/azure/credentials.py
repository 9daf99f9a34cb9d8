"""Who Azure Blob Storage will take us for: a key or SAS of the environment, or an identity."""

from __future__ import annotations

import base64
import binascii
import json
from urllib.parse import parse_qsl

from spotguard.errors import MissingExtra, StoreError
from spotguard.storage.azure.access import find_place
from spotguard.storage.credentials import Identity
from spotguard.storage.http.private_random import draw_privately

_SCOPE = "https://storage.azure.com/.default"
_NAMES = ("upn", "unique_name", "appid", "oid")
"""Claims of a token that name who it was given to, the most telling first."""


def azure_identity(url: str) -> Identity:
    """Return the credentials for a container, just those that the store itself would use."""
    place = find_place(url)
    if place.connection_string:
        pairs = (pair.partition("=") for pair in place.connection_string.split(";"))
        given = {name.strip().lower(): value for name, _, value in pairs}
        kind = _sas(given.get("sharedaccesssignature", "")) or "the account's key"
        source = f"AZURE_STORAGE_CONNECTION_STRING ({kind})"
    elif place.key:
        source = "AZURE_STORAGE_KEY (the account's key)"
    elif place.sas:
        source = f"AZURE_STORAGE_SAS_TOKEN ({_sas(place.sas)})"
    else:
        return _logged_in(url)
    return Identity(source=source, who=f"account {place.account}")


def _sas(token: str) -> str:
    """Return what a SAS allows and until when, without its signature; nothing if there is none."""
    given = dict(parse_qsl(token.lstrip("?")))
    if not given:
        return ""
    return f"a SAS for {given.get('sp', 'unknown rights')} until {given.get('se', 'unknown')}"


def _logged_in(url: str) -> Identity:
    try:
        from azure.core.exceptions import AzureError
        from azure.identity import DefaultAzureCredential
    except ImportError:
        raise MissingExtra(
            "Azure Blob Storage without a key needs azure-identity, which is not installed",
            hint="pip install 'spotguard[azure]'",
        ) from None
    draw_privately("azure")
    try:
        with DefaultAzureCredential() as credential:
            token = credential.get_token(_SCOPE).token
    except (AzureError, ValueError) as problem:  # which run over pages, and may quote a token
        raise StoreError(
            f"there are no usable credentials for {url} ({type(problem).__name__})",
            hint="run `az login`, give the machine an identity, or set AZURE_STORAGE_KEY",
        ) from None
    return Identity(source="az login, or this machine's identity", who=named_in(token))


def named_in(token: str) -> str | None:
    """Return who a token was given to; it is not proven, the server does that."""
    try:
        body = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(f"{body}{'=' * (-len(body) % 4)}"))
        return next((str(claims[name]) for name in _NAMES if claims.get(name)), None)
    except (IndexError, binascii.Error, ValueError, AttributeError, TypeError):
        return None
