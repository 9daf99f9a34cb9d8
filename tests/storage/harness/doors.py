"""What stands before each service and asks for a token that has not expired.

A door is a fault that befalls every request: whoever shows the newest token gets through, any other
is refused as that service does it. Where tokens come from is the door's, too: a file for S3, a
token service for Google's, a login for Azure's.
"""

from __future__ import annotations

import json
import threading
import time
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from tests.storage.harness import fault_proxy as faults
from tests.storage.harness.scripted_server import Reply
from tests.storage.harness.servers import AZURITE_ACCOUNT, AZURITE_KEY

if TYPE_CHECKING:
    from pathlib import Path

    from azure.core.credentials import AccessToken

    from tests.storage.harness.fault_proxy import Exchange
    from tests.storage.harness.scripted_server import Request

TOKEN = "planted-token"
"""With a number after it."""
REFRESH = "planted-refresh-token"
CLIENT_SECRET = "planted-client-secret"
SESSION = "planted-session-token"


class Door:
    """Lets in whoever shows the newest token; when one expires, a new one may be had."""

    def __init__(self) -> None:
        self.number = 1
        self.renewable = True
        self.refused = 0
        """How many requests were refused."""
        self._left: int | None = None
        self._renewable_then = True
        self._lock = threading.Lock()

    @property
    def token(self) -> str:
        """The one that is good now."""
        return f"{TOKEN}-{self.number}"

    def expire(self, *, renewable: bool = True) -> None:
        """Let nobody in any more with a token that was given until now."""
        self.number += 1
        self.renewable = renewable
        self._left = None
        self.renewed()

    def expire_at(self, nth: int, *, renewable: bool = True) -> None:
        """Let the token expire with the `nth` request from now on, which comes too late."""
        self.refused, self._left, self._renewable_then = 0, nth, renewable

    def renewed(self) -> None:
        """Put the new token where it is looked for, unless it is asked for."""

    def shown(self, exchange: Exchange) -> str:
        """Return the token that came with a request."""
        return exchange.headers.get("authorization", "").removeprefix("Bearer ")

    def refuse(self, exchange: Exchange) -> None:
        """Say that the token has expired."""
        raise NotImplementedError

    def let_in(self, exchange: Exchange) -> None:
        """Pass the request on to the server."""
        exchange.pass_on()

    def __call__(self, exchange: Exchange) -> None:
        """Be the fault."""
        with self._lock:
            if self._left is not None:
                self._left -= 1
                if not self._left:
                    self.expire(renewable=self._renewable_then)
            good = self.shown(exchange) == self.token
            self.refused += not good
        if good:
            self.let_in(exchange)
        else:
            self.refuse(exchange)


class S3Door(Door):
    """The credentials are in a file, as AWS's tools write it; the token is the key's id."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self.renewed()

    def renewed(self) -> None:
        """Write the file anew."""
        if self.renewable:
            self._path.write_text(
                f"[default]\naws_access_key_id={self.token}\naws_secret_access_key={CLIENT_SECRET}\n"
                f"aws_session_token={SESSION}\n"
            )

    def shown(self, exchange: Exchange) -> str:
        """Return the key's id from the signature."""
        _, _, after = exchange.headers.get("authorization", "").partition("Credential=")
        return after.partition("/")[0]

    def refuse(self, exchange: Exchange) -> None:
        """Answer as S3, which says nothing to a HEAD."""
        said = f"<Error><Code>ExpiredToken</Code><Message>{exchange.headers}</Message></Error>"
        faults.refuse(400, said.encode() * (exchange.method != "HEAD"))(exchange)


class GoogleDoor(Door):
    """The token service gives a new token for a refresh token, or says that it was revoked."""

    def refuse(self, exchange: Exchange) -> None:
        """Answer as Google Cloud Storage."""
        said = f"Invalid Credentials {exchange.headers}"
        error = {"code": 401, "message": said, "errors": [{"reason": "authError", "message": said}]}
        faults.refuse(401, json.dumps({"error": error}).encode())(exchange)

    def give_token(self, request: Request) -> Reply:
        """Answer as the token service."""
        kind = {"content-type": "application/json"}
        if not self.renewable:
            why = {"error": "invalid_grant", "error_description": f"revoked: {request.body!r}"}
            return Reply(400, kind, json.dumps(why).encode())
        given = {"access_token": self.token, "expires_in": 3600, "token_type": "Bearer"}
        return Reply(200, kind, json.dumps(given).encode())


class AzureDoor(Door):
    """A login that gives tokens. Azurite knows none: it is shown a signature in their place."""

    def __init__(self) -> None:
        from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

        super().__init__()
        self._signature = generate_account_sas(
            AZURITE_ACCOUNT,
            AZURITE_KEY,
            ResourceTypes(container=True, object=True),
            AccountSasPermissions(read=True, write=True, delete=True, list=True, create=True),
            datetime.now(timezone.utc) + timedelta(hours=1),
        )

    def get_token(self, *_scopes: str, **_options: object) -> AccessToken:
        """Return the token that is good now, as a `TokenCredential`."""
        from azure.core.credentials import AccessToken
        from azure.core.exceptions import ClientAuthenticationError

        if not self.renewable:
            raise ClientAuthenticationError(f"AADSTS700082: {TOKEN} and {REFRESH} have expired")
        return AccessToken(self.token, int(time.time() + 3600))

    def refuse(self, exchange: Exchange) -> None:
        """Answer as Azure Blob Storage, which says where to ask for a token."""
        code = "InvalidAuthenticationInfo"
        said = f"<Error><Code>{code}</Code><Message>{exchange.headers}</Message></Error>"
        challenge = (
            "Bearer authorization_uri=https://login.microsoftonline.com/TENANT/oauth2/authorize "
            "resource_id=https://storage.azure.com"
        )
        headers = {"WWW_Authenticate": challenge, "Content_Type": "application/xml"}
        body = said.encode() * (exchange.method != "HEAD")
        faults.refuse(401, body, x_ms_error_code=code, **headers)(exchange)

    def let_in(self, exchange: Exchange) -> None:
        """Sign the request, and pass it on."""
        del exchange.headers["authorization"]
        exchange.target += f"{'&' if '?' in exchange.target else '?'}{self._signature}"
        exchange.pass_on()
