"""Keeps secrets out of all that leaves a process: what is printed, reported, written down, told.

Each process knows secrets: those of its environment and, in a controller, those of the jobs that it
has read. `masked` takes them out of data that is about to be stored or sent. The writers themselves
call it (events, the journal, what a controller publishes, webhooks), so that no caller can forget.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, quote_plus, unquote

from spotguard.events import env

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

MASK = b"***"
SHORTEST = 6
"""A shorter value, such as `false` or `4`, is none that could be told from other words."""
_SHORTEST_CUT = 8
"""So much of a secret's beginning, at the end of a text that was cut, is masked as well."""
_CUT_FROM = 100
"""A shorter text is not taken for one that was cut."""
_SHORTEST_LINE = 8
_SECRET_WORDS = frozenset(
    {"token", "secret", "password", "passwd", "passphrase", "key", "apikey", "credentials"}
)
"""A variable with such a word in its name is taken for a secret, whoever has set it."""
_ARGUMENT_WORDS = _SECRET_WORDS | {"pwd", "auth", "credential", "authtoken", "accesskey"}
_NAME_ENDS = re.compile(r"[-_.]+")
_LOGIN = re.compile(r"(?<=://)[^/@\s]*:([^/@\s]+)(?=@)")
_PROSE = frozenset({"message", "problem", "why", "detail", "traceback", "text", "answer"})
"""Fields of what people read, whatever it looks like."""


def secrets_of(environ: Mapping[str, str]) -> set[str]:
    """Return the values of a job's variables that are not to be stored.

    These are the variables that the user gave by `env`, which `SPOTGUARD_SECRETS` names, the
    run's own keys, and whatever is called a key, token, secret or password.
    """
    named = set(environ.get(env.SECRETS, "").split(","))
    return _long_enough(
        value for name, value in environ.items() if name in named or _is_secret_name(name)
    )


def _is_secret_name(name: str) -> bool:
    return name in (env.KEY, env.CACHE_KEY) or _has_word(name, _SECRET_WORDS)


def _has_word(name: str, words: frozenset[str]) -> bool:
    return not words.isdisjoint(_NAME_ENDS.split(name.lower().strip("-+~")))


def _long_enough(values: Iterable[str]) -> set[str]:
    return {value.strip() for value in values if len(value.strip()) >= SHORTEST}


def shown_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a script's arguments as they may be shown: without values that are named as keys.

    `--api-key X`, `--token=X`, `password=X` and a URL's login are masked.
    """
    return [
        word[:start] + "***" + word[end:] if end else word for word, start, end in _of(arguments)
    ]


def secrets_in(arguments: Sequence[str]) -> set[str]:
    """Return the values that `shown_arguments` masks."""
    return _long_enough(word[start:end] for word, start, end in _of(arguments))


def _of(arguments: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    """Yield each argument, and where in it a secret begins and ends; 0 and 0: it has none."""
    is_value = False
    for word in arguments:
        name, equals, _ = word.partition("=")
        login = _LOGIN.search(word)
        if is_value and not word.startswith("--"):
            yield word, 0, len(word)
        elif equals and _has_word(name, _ARGUMENT_WORDS):
            yield word, len(name) + 1, len(word)
        elif login:
            yield word, login.start(1), login.end(1)
        else:
            yield word, 0, 0
        is_value = not equals and word.startswith("-") and _has_word(word, _ARGUMENT_WORDS)


class KnownSecrets:
    """The secrets that this process knows: it only ever learns more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._has_looked = False
        self._values: set[str] = set()
        self._named: set[str] = set()
        """Those that are called a key, token, secret or password."""
        self._maskers: tuple[Masker, Masker] | None = None

    def learn(self, values: Iterable[str], *, named: bool) -> None:
        """Mask these values from now on; `named`: in all words."""
        values = _long_enough(values)
        with self._lock:
            if values <= (self._named if named else self._values):
                return
            self._values |= values
            self._named |= values if named else set()
            self._maskers = None

    def maskers(self) -> tuple[Masker, Masker]:
        """Return what masks prose, and what masks names and other words."""
        if not self._has_looked:
            self._has_looked = True
            know(os.environ, sys.argv, only_secrets=True)
        with self._lock:
            if self._maskers is None:
                self._maskers = (Masker(self._values), Masker(self._named))
            return self._maskers


KNOWN = KnownSecrets()
"""Those of this process."""


def know(
    variables: Mapping[str, str],
    arguments: Sequence[str] = (),
    *,
    secrets: Iterable[str] = (),
    only_secrets: bool = False,
) -> None:
    """Mask the values of variables, and of arguments named as keys, in all that leaves from now on.

    Args:
        variables: their values are masked in prose; those of keys and tokens in all words.
        arguments: a script's.
        secrets: what else is masked in all words.
        only_secrets: of the variables only those that `secrets_of` takes for secrets.
    """
    values = secrets_of(variables) if only_secrets else set(variables.values())
    named = {value for name, value in variables.items() if _is_secret_name(name)}
    KNOWN.learn(values, named=False)
    KNOWN.learn(named | secrets_in(arguments) | set(secrets), named=True)


def masked(data: Any, *, kept: frozenset[str] = frozenset()) -> Any:
    """Return JSON data without the secrets that this process knows, in any form that texts have.

    Prose loses all of them. Words without spaces, such as a region or a run's name, lose only what
    is called a key, token, secret or password: a variable `STAGE=train` must not spoil a name.

    Args:
        data: texts, numbers, lists and dicts. Keys of dicts are left as they are.
        kept: keys of the outermost dict whose values are left as they are.
    """
    prose, words = KNOWN.maskers()
    if not prose.secrets:
        return data
    if kept and isinstance(data, dict):
        return {
            key: each if key in kept else _masked(each, prose, words, key in _PROSE)
            for key, each in data.items()
        }
    return _masked(data, prose, words, False)


def _masked(data: Any, prose: Masker, words: Masker, is_prose: bool) -> Any:
    if isinstance(data, str):
        return (prose if is_prose or any(map(str.isspace, data)) else words).text(data)
    if isinstance(data, dict):
        return {key: _masked(each, prose, words, key in _PROSE) for key, each in data.items()}
    if isinstance(data, (list, tuple)):
        return [_masked(each, prose, words, is_prose) for each in data]
    return data


def _forms(value: str) -> Iterator[str]:
    """Yield how a secret may stand in a text."""
    parts = {value, *_parts(value)}
    for part in parts:
        yield part
        yield repr(part)[1:-1]
        for quoted in (quote(part, safe=""), quote(part), quote_plus(part)):
            yield quoted
            yield re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), quoted)
        for text in (json.dumps(part), json.dumps(part, ensure_ascii=False)):
            yield text[1:-1]
            yield json.dumps(text[1:-1])[1:-1]
        yield part.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        yield from _base64_forms(part)


def _parts(value: str) -> Iterator[str]:
    """Yield what of a value is a secret by itself: a PEM's lines, a URL's or a JSON's password."""
    lines = re.split(r"[\r\n]+|\\r?\\?n|\\n", value)
    if len(lines) > 1:
        yield from (
            line.strip()
            for line in lines
            if len(line.strip()) >= _SHORTEST_LINE and not line.strip().startswith("-----")
        )
    for login in _LOGIN.finditer(value):
        yield from _long_enough((login[1], unquote(login[1])))
    if value.startswith("{"):
        try:
            fields = json.loads(value)
        except ValueError:
            return
        for name, field in fields.items():
            if isinstance(field, str) and _has_word(name, _SECRET_WORDS):
                yield from _long_enough((field,))
                yield from _parts(field)


def _base64_forms(value: str) -> Iterator[str]:
    """Yield what base64 has of a value wherever it begins in what was encoded."""
    raw = value.encode("utf-8", "surrogateescape")
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + raw).decode()
        size = before + len(raw)
        whole = encoded[(0, 2, 3)[before] : size // 3 * 4 + size % 3]
        if len(whole) >= SHORTEST:
            yield whole
            yield whole.replace("+", "-").replace("/", "_")


class Masker:
    """Knows secrets, in each form in which they may stand; makes a stream for each file."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """Take the values as they are to be found in plain text."""
        forms = {form for value in secrets if value for form in _forms(value)}
        raw = {form.encode("utf-8", "surrogateescape") for form in forms}
        self.secrets = sorted(filter(None, raw), key=len, reverse=True)

    def stream(self) -> MaskedStream:
        """Return what masks one file's bytes."""
        return MaskedStream(self)

    def found_in(self, data: bytes) -> re.Pattern[bytes] | None:
        """Return a pattern of the secrets in `data`; None: there is none.

        Most often there is none, and to look for each is ten times as fast as one large pattern.
        """
        found = [secret for secret in self.secrets if secret in data]
        return re.compile(b"|".join(map(re.escape, found))) if found else None

    def text(self, text: str) -> str:
        """Return a text without secrets, nor a long beginning of one at its end: it may be cut."""
        data = text.encode("utf-8", "surrogatepass")
        pattern = self.found_in(data)
        masked = pattern.sub(MASK, data) if pattern else data
        ending = masked.removesuffix("…".encode())
        begins = self.beginning(ending, 0)
        if len(text) >= _CUT_FROM and len(ending) - begins >= _SHORTEST_CUT:
            masked = ending[:begins] + MASK
        return text if masked == data else masked.decode("utf-8", "surrogatepass")

    def beginning(self, data: bytes, start: int) -> int:
        """Return where the longest end of `data` begins that may become a secret."""
        found = len(data)
        for secret in self.secrets:
            # Only where the end's first byte is the secret's can it begin.
            at = data.find(secret[:1], max(start, len(data) - len(secret) + 1))
            while 0 <= at < found:
                if secret.startswith(data[at:]):
                    found = at
                at = data.find(secret[:1], at + 1)
        return found


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
        held_from = self._masker.beginning(data, 0)
        parts: list[bytes] = []
        at = 0
        pattern = self._masker.found_in(data)
        for match in pattern.finditer(data) if pattern else ():
            if match.start() >= held_from:
                break  # a longer secret may begin here
            parts += (data[at : match.start()], MASK)
            at = match.end()
            if at > held_from:
                held_from = self._masker.beginning(data, at)
        parts.append(data[at:held_from])
        self._held = data[held_from:]
        return b"".join(parts)

    def rest(self) -> bytes:
        """Return what waited: nothing follows."""
        held, self._held = self._held, b""
        pattern = self._masker.found_in(held)
        return pattern.sub(MASK, held) if pattern else held
