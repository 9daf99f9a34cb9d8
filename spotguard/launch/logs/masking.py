"""Keeps secrets out of what is stored of a job's output."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from spotguard.events import env

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MASK = b"***"
SHORTEST = 6
"""A shorter value, such as `false` or `4`, is none that could be told from other words."""
_SECRET_WORDS = frozenset(
    {"token", "secret", "password", "passwd", "passphrase", "key", "apikey", "credentials"}
)
"""A variable with such a word in its name is taken for a secret, whoever has set it."""


def secrets_of(environ: Mapping[str, str]) -> set[str]:
    """Return the values of a job's variables that are not to be stored.

    These are the variables that the user gave by `env`, which `SPOTGUARD_SECRETS` names, the
    run's own keys, and whatever is called a key, token, secret or password.
    """
    named = set(environ.get(env.SECRETS, "").split(","))
    found = set()
    for name, value in environ.items():
        is_secret = (
            name in named
            or name in (env.KEY, env.CACHE_KEY)
            or not _SECRET_WORDS.isdisjoint(name.lower().split("_"))
        )
        if is_secret and len(value.strip()) >= SHORTEST:
            found.add(value.strip())
    return found


class Masker:
    """Knows the secrets; makes a stream for each file."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """Values are masked as they are, and as Python shows a text with line ends."""
        plain = {value.encode("utf-8", "surrogateescape") for value in secrets}
        shown = {repr(value)[1:-1].encode("utf-8", "surrogateescape") for value in secrets}
        self.secrets = sorted(filter(None, plain | shown), key=len, reverse=True)
        self.pattern = re.compile(b"|".join(map(re.escape, self.secrets)))

    def stream(self) -> MaskedStream:
        """Return what masks one file's bytes."""
        return MaskedStream(self)


class MaskedStream:
    """Masks a stream of bytes, however it is cut: what may be a secret's beginning waits."""

    def __init__(self, masker: Masker) -> None:
        self._masker = masker
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return what can be said now of all that was fed."""
        if not self._masker.secrets:
            return data
        data = self._held + data
        held_from = self._beginning(data, 0)
        parts: list[bytes] = []
        at = 0
        for match in self._masker.pattern.finditer(data):
            if match.start() >= held_from:
                break  # a longer secret may begin here
            parts += (data[at : match.start()], MASK)
            at = match.end()
            if at > held_from:
                held_from = self._beginning(data, at)
        parts.append(data[at:held_from])
        self._held = data[held_from:]
        return b"".join(parts)

    def rest(self) -> bytes:
        """Return what waited: nothing follows."""
        held, self._held = self._held, b""
        return self._masker.pattern.sub(MASK, held) if self._masker.secrets else held

    def _beginning(self, data: bytes, start: int) -> int:
        """Return where the longest end of `data` begins that may become a secret."""
        found = len(data)
        for secret in self._masker.secrets:
            # Only where the end's first byte is the secret's can it begin.
            at = data.find(secret[:1], max(start, len(data) - len(secret) + 1))
            while 0 <= at < found:
                if secret.startswith(data[at:]):
                    found = at
                at = data.find(secret[:1], at + 1)
        return found
