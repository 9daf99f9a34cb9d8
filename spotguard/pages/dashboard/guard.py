"""Who may ask the dashboard what. Every request passes here first; what is not allowed is refused.

A browser that visits another page can be made to send requests to loopback. So:

- the `Host` must be this very server: a foreign name that points to loopback is refused;
- a request must have the token: in the cookie, as a bearer, or once in the address, which is then
  exchanged for the cookie (`HttpOnly`, `SameSite=Strict`), so that it stays in no history;
- an `Origin`, and what browsers say of the asking page (`Sec-Fetch-Site`), must be this server's.
  Ports of one host are one site to a cookie, so that the cookie alone proves nothing;
- what changes something is a POST of JSON with a header that no form can send.
"""

from __future__ import annotations

import hmac
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode

from starlette.responses import PlainTextResponse, RedirectResponse, Response

from spotguard.pages.html import policy

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ACTION_HEADER = "x-spotguard"
_SAFE = ("GET", "HEAD")
_OWN_SITE = ("same-origin", "none")
_HEADERS = (
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cache-control", "no-store"),
    ("permissions-policy", "camera=(), geolocation=(), microphone=()"),
)


class Guard:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self._app = app
        self._token = token
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}
        self._origins = {f"http://{host}" for host in self._hosts}
        self._cookie = f"spotguard-{port}"  # cookies of one host are shared by all its ports
        self._policy = f"{policy(connects=True)}; frame-ancestors 'none'"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        refusal = self._refusal(scope, headers)
        await (refusal or self._app)(scope, receive, self._armed(send))

    def _armed(self, send: Send) -> Send:
        """Return what sends an answer with the headers that each one has."""

        async def armed(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(b"content-security-policy", self._policy.encode())]
                own += [(name.encode(), value.encode()) for name, value in _HEADERS]
                message = {**message, "headers": [*message.get("headers", ()), *own]}
            await send(message)

        return armed

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> Response | None:
        """Return the answer to a request that goes no further."""
        if headers.get("host") not in self._hosts:
            return _refused(421, "This name is not the dashboard's: use the address it printed.")
        is_safe = scope["method"] in _SAFE
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins:
            return _refused(403, "Another page may not ask.")
        site = headers.get("sec-fetch-site", "none")
        is_visit = is_safe and headers.get("sec-fetch-mode") == "navigate"
        if site not in _OWN_SITE and not is_visit:
            return _refused(403, "Another page may not ask.")
        offered = _in_query(scope)
        if is_safe and offered is not None:
            return self._exchange(scope, offered)
        if not self._is_known(headers):
            return _refused(401, "Open the address that `spotguard dashboard` printed.")
        if not is_safe and headers.get(ACTION_HEADER) != "1":
            return _refused(403, "That is asked for on the dashboard's own pages only.")
        return None

    def _exchange(self, scope: Scope, offered: str) -> Response:
        """Return the way to the same page without the token, which the cookie has from now on."""
        if not self._is_token(offered):
            return _refused(
                401, "That is not the token: it changes each time the dashboard starts."
            )
        query = [(name, value) for name, value in _query(scope) if name != "token"]
        path = "/" + str(scope["path"]).lstrip("/\\")  # "//host" would lead elsewhere
        answer = RedirectResponse(path + (f"?{urlencode(query)}" if query else ""), 303)
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
        return answer

    def _is_known(self, headers: dict[str, str]) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            return self._is_token(bearer.strip())
        try:
            kept = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return False
        return kept is not None and self._is_token(kept.value)

    def _is_token(self, offered: str) -> bool:
        return hmac.compare_digest(offered.encode(), self._token.encode())


def _query(scope: Scope) -> list[tuple[str, str]]:
    return parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)


def _in_query(scope: Scope) -> str | None:
    return next((value for name, value in _query(scope) if name == "token"), None)


def _refused(status: int, words: str) -> Response:
    return PlainTextResponse(words + "\n", status)
