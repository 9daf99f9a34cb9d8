"""Where a container of Azure Blob Storage is, and by what right it is used.

The account is named by the URL or by the environment, and the key always by the environment, in
the variables that Azure's own tools read: AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT
with AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN. Without a key, the machine's own identity is
used, or whoever is logged in: `azure.identity.DefaultAzureCredential`.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from spotguard.errors import MissingExtra, StoreError, UsageError
from spotguard.storage.azure.errors import no_token
from spotguard.storage.http.private_random import draw_privately
from spotguard.storage.urls import taken_apart

if TYPE_CHECKING:
    from urllib.parse import SplitResult

    from azure.core.credentials import AccessToken, TokenCredential
    from azure.storage.blob import ContainerClient

_PUBLIC_CLOUD = "blob.core.windows.net"


@dataclass(frozen=True, kw_only=True)
class AzurePlace:
    """A prefix in a container, and by what right it is used."""

    url: str
    """In the form `open_store` takes."""
    account: str
    endpoint: str = ""
    """Of the account's blobs, if not the connection string says it."""
    container: str
    prefix: str = ""
    """Empty, or with a trailing `/`."""
    connection_string: str = field(default="", repr=False)
    key: str = field(default="", repr=False)
    sas: str = field(default="", repr=False)

    @property
    def host(self) -> str:
        """Which server it is, for messages."""
        return urlsplit(self.endpoint).netloc or _parts_of(self.connection_string)["host"]

    @property
    def has_secret(self) -> bool:
        """Whether no identity is needed."""
        given = self.connection_string.lower()
        return bool(self.key or self.sas or "accountkey=" in given or "accesssignature=" in given)


def find_place(url: str) -> AzurePlace:
    """Return what `url` and the environment name. Nothing is asked of any server.

    `az://CONTAINER/PREFIX` (the account is named by the environment),
    `az://CONTAINER@ACCOUNT/PREFIX` or `https://ACCOUNT.blob.core.windows.net/CONTAINER/PREFIX`.
    """
    parts = taken_apart(url)
    if parts.query or parts.fragment or parts.password:
        raise UsageError(
            f"store {parts.scheme}://{parts.hostname}{parts.path}: there is more than a place",
            hint="a URL is no place for a key; put a SAS into AZURE_STORAGE_SAS_TOKEN",
        )
    read = _from_https if parts.scheme == "https" else _from_az
    account, host, container, prefix = read(parts)
    given = _env("AZURE_STORAGE_CONNECTION_STRING")
    given_account = _parts_of(given)["account"] if given else ""
    if account not in ("", given_account):
        given = ""
    account = account or given_account or _env("AZURE_STORAGE_ACCOUNT")
    if not account or not container:
        raise UsageError(
            f"store {url!r} names no {'account' if container else 'container'}",
            hint="write az://CONTAINER@ACCOUNT/PREFIX, or set AZURE_STORAGE_ACCOUNT",
        )
    return AzurePlace(
        url=_canonical(account, host, container, prefix),
        account=account,
        endpoint="" if given else f"https://{host or f'{account}.{_PUBLIC_CLOUD}'}",
        container=container,
        prefix=f"{prefix}/" if prefix else "",
        connection_string=given,
        key="" if given else _env("AZURE_STORAGE_KEY"),
        sas=_sas() if "accesssignature=" not in given.lower() else "",
    )


def _from_az(parts: SplitResult) -> tuple[str, str, str, str]:
    container, _, account = parts.netloc.partition("@")
    return account, "", container, parts.path.strip("/")


def _from_https(parts: SplitResult) -> tuple[str, str, str, str]:
    container, _, prefix = unquote(parts.path).strip("/").partition("/")
    return parts.netloc.partition(".")[0], parts.netloc, container, prefix


def _canonical(account: str, host: str, container: str, prefix: str) -> str:
    below = f"/{prefix}" if prefix else ""
    if host and host != f"{account}.{_PUBLIC_CLOUD}":
        return f"https://{host}/{container}{quote(below)}"
    return f"az://{container}@{account}{below}"


def _parts_of(connection_string: str) -> dict[str, str]:
    """Return what messages need of it, names in lower case; all else is the client's to read."""
    pairs = (pair.partition("=") for pair in connection_string.split(";"))
    given = {name.strip().lower(): value.strip() for name, _, value in pairs}
    host = urlsplit(given.get("blobendpoint", "")).netloc
    account = given.get("accountname") or host.partition(".")[0]
    if not account:
        raise UsageError(
            "AZURE_STORAGE_CONNECTION_STRING names no account",
            hint="copy it whole: az storage account show-connection-string --name ACCOUNT",
        )
    suffix = given.get("endpointsuffix", "core.windows.net")
    return {"account": account, "host": host or f"{account}.blob.{suffix}"}


def _sas() -> str:
    token = _env("AZURE_STORAGE_SAS_TOKEN").lstrip("?")
    if token and "sig" not in parse_qs(token):
        raise UsageError(
            "AZURE_STORAGE_SAS_TOKEN holds no signature",
            hint="it looks like sv=...&sp=rwdl&se=...&sig=...",
        )
    return token


def _env(name: str) -> str:
    return os.environ.get(name, "").strip()


def need_packages(place: AzurePlace) -> None:
    """Raise `MissingExtra` unless what it takes to use `place` is installed."""
    for name in ("azure.storage.blob", *(() if place.has_secret else ("azure.identity",))):
        if not _is_installed(name):
            raise MissingExtra(
                f"stores at az:// need {name}, which is not installed",
                hint="pip install 'spotguard[azure]'",
            )


def _is_installed(name: str) -> bool:
    # To look for a package imports those that it is in, which are empty; but they must be there.
    parent = name.rpartition(".")[0]
    return (not parent or _is_installed(parent)) and importlib.util.find_spec(name) is not None


def connect(
    place: AzurePlace, login: TokenCredential | None = None, **options: Any
) -> ContainerClient:
    """Return the vendor's client for the container; no server is asked yet.

    `login` gives tokens; without it `place` has a key, or the machine's identity is used.
    """
    from azure.core.credentials import AzureNamedKeyCredential
    from azure.storage.blob import ContainerClient

    draw_privately("azure")
    credential: Any = None
    if login or not place.has_secret:
        credential = AzureIdentity(login or _default_login())
    elif place.key:
        credential = AzureNamedKeyCredential(place.account, place.key)
    elif place.sas:
        credential = place.sas
    if place.connection_string:
        return _by_connection_string(place, credential, options)
    return ContainerClient(place.endpoint, place.container, credential=credential, **options)


def _by_connection_string(place: AzurePlace, credential: Any, options: Any) -> ContainerClient:
    from azure.storage.blob import ContainerClient

    try:
        return ContainerClient.from_connection_string(
            place.connection_string, place.container, credential, **options
        )
    except ValueError:
        raise StoreError(
            "AZURE_STORAGE_CONNECTION_STRING makes no sense",
            hint=f"copy it whole: az storage account show-connection-string --name {place.account}",
        ) from None


class AzureIdentity:
    """Gives tokens for requests; why there is none is told in our words."""

    def __init__(self, login: TokenCredential) -> None:
        self._login = login

    def get_token(self, *scopes: str, **options: Any) -> AccessToken:
        """Return a token; the client keeps it while it is good."""
        from azure.core.exceptions import AzureError

        try:
            return self._login.get_token(*scopes, **options)
        except (AzureError, ValueError) as problem:  # the latter of settings, which it quotes
            raise no_token(problem) from None


def _default_login() -> TokenCredential:
    from azure.identity import DefaultAzureCredential

    try:
        return DefaultAzureCredential()
    except ValueError as problem:  # of a tenant that cannot be one
        raise no_token(problem) from None
