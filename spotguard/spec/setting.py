"""What is known of one setting, and the parsers that turn what was written into a value.

A parser takes whatever a flag, a variable or a TOML file may hold, and either returns the one
canonical value or raises ValueError. It says nothing about what is allowed: `Setting.allowed` does,
once, for the error message and for the reference page.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic_core import CoreSchema, core_schema

from spotguard.events import env
from spotguard.events.env import HOLD, JOB_VARIABLES, MAX_STEPS, PROBE, TRACE_SAMPLES
from spotguard.shared.cache_folders import cache_folder
from spotguard.shared.units import from_iso, parse_duration_s

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler

Parser = Callable[[Any], object]

MAX_NAME_CHARS = 40
"""A run id is the name, a date and a suffix, and has to fit into 63 characters."""
_SHORTEST_S = 0.001
_LATEST_AT = 32_503_680_000.0
"""The year 3000."""
_LONGEST_NUMBER = 64

_NAME = re.compile(rf"[a-z0-9](?:[a-z0-9-]{{0,{MAX_NAME_CHARS - 2}}}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STEPS = re.compile(r"(\d+) ?steps?")
_GROUPED = re.compile(r"[1-9]\d{0,2}(,\d{3})+(\.\d+)?")
"""The one use of commas in money: between thousands. In `1,50` and `0,918` one means a point."""

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{1,31}")
BUDGET_TOPIC, BURN_TOPIC = "budget", "burn-rate"
PATIENT_TOPICS = ("waiting", "no-save")
PLAIN_TOPICS = ("preempted", "contact-lost", "ended")
BUDGET_SHARES = (50, 80, 95)
DEFAULT_TOPICS = (f"{BUDGET_TOPIC} 50,80,95", "ended")

_ENCRYPTION = frozenset(
    {env.S3_SSE, env.S3_SSE_KMS_KEY_ID, env.GCS_KMS_KEY, env.AZURE_ENCRYPTION_SCOPE}
)
VARIABLES_FOR_USERS = frozenset({TRACE_SAMPLES, PROBE, MAX_STEPS, HOLD}) | _ENCRYPTION
"""The job's variables that a user may set; the controller owns all others."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How one field is written, checked and explained; goes into the field's annotation."""

    parse: Parser
    allowed: str
    """Completes the sentence 'allowed: …'."""
    example: str
    """A valid value, as TOML."""
    key: str = ""
    """The name in files; the field's own unless the field carries a unit."""
    flag: str | None = None
    """The command line's option, if it has one."""
    variable: str | None = None
    """The environment variable, when `SPOTGUARD_` and the key in capitals is not it."""
    is_path: bool = False
    """True when a relative value means 'relative to the file in which it stands'."""
    is_duration: bool = False
    choices: tuple[str, ...] = ()
    """The only words allowed, for guessing what a typo meant."""

    def __get_pydantic_core_schema__(
        self, source: type, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Make pydantic parse the raw value before it checks the type."""
        return core_schema.no_info_before_validator_function(self.parse, handler(source))


@dataclass(frozen=True)
class IfGiven:
    """A parser that lets None (not given) pass."""

    parse: Parser

    def __call__(self, raw: Any) -> object:
        """Return None, or what was parsed."""
        return None if raw is None else self.parse(raw)


def text(raw: Any) -> str:
    """Return a text that is not empty and that an operating system can carry."""
    if not isinstance(raw, str) or not raw.strip() or "\0" in raw:
        raise ValueError("not a text")
    return raw.strip()


def store_url(raw: Any) -> str:
    """Return a store's URL, or the path of a folder, that `open_store` takes.

    The vendor's package may be missing here: nodes install what they need. Messages hold no login
    that stands in the URL.
    """
    from spotguard.errors import MissingExtra, UsageError
    from spotguard.spec.complaint import SaysItAll
    from spotguard.storage import open_store

    url = text(raw)
    try:
        open_store(url)
    except MissingExtra:
        pass
    except UsageError as problem:
        raise SaysItAll(problem.message.removeprefix("store "), hint=problem.hint) from None
    return url


def number(raw: Any) -> float:
    """Return a finite number above 0."""
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise ValueError("not a number")
    if isinstance(raw, str) and len(raw) > _LONGEST_NUMBER:
        raise ValueError("not a number")
    try:
        value = float(raw)
    except OverflowError as problem:
        raise ValueError("not a number") from problem
    if not math.isfinite(value) or value <= 0:
        raise ValueError("not above 0")
    return value


def usd(raw: Any) -> float:
    """Return an amount of money above 0, also for `"$1,200"`; a decimal comma is refused."""
    if isinstance(raw, str):
        raw = raw.strip().removeprefix("$").strip()
        if "," in raw:
            if not _GROUPED.fullmatch(raw):
                raise ValueError("a comma that parts no thousands")
            raw = raw.replace(",", "")
    return number(raw)


def instant(value: Any) -> float:
    """Return the epoch seconds of an ISO 8601 instant with a zone, such as 2026-05-01T22:00Z."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        at = float(value)  # as it is kept
    else:
        at = from_iso(text(value))
    if not 0 <= at < _LATEST_AT:
        raise ValueError
    return at


def duration(raw: Any) -> float:
    """Return seconds above 0, a millisecond at least: less could not be written down again."""
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise ValueError("not a duration")
    try:
        seconds = number(parse_duration_s(raw))
    except OverflowError as problem:
        raise ValueError("not a duration") from problem
    if seconds < _SHORTEST_S:
        raise ValueError("too short")
    return seconds


@dataclass(frozen=True)
class Whole:
    """A parser of whole numbers from `lowest` to `highest`."""

    lowest: int
    highest: int = 2**63 - 1

    def __call__(self, raw: Any) -> int:
        """Return the number."""
        if isinstance(raw, bool) or not isinstance(raw, (int, str)):
            raise ValueError("not a whole number")
        if isinstance(raw, str) and len(raw) > _LONGEST_NUMBER:
            raise ValueError("not a whole number")
        value = int(raw)
        if not self.lowest <= value <= self.highest:
            raise ValueError("out of range")
        return value


@dataclass(frozen=True)
class OneOf:
    """A parser that accepts these words only; `-` and `_` are the same."""

    words: tuple[str, ...]

    def __call__(self, raw: Any) -> str:
        """Return the word."""
        word = text(raw).replace("-", "_")
        if word not in self.words:
            raise ValueError("not one of the words")
        return word


def switch(raw: Any) -> bool:
    """Return True or False, also for the words that environment variables hold."""
    if isinstance(raw, bool):
        return raw
    word = text(raw).lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("neither true nor false")


def texts(raw: Any) -> tuple[str, ...]:
    """Return several texts; a single one is a list of one."""
    if isinstance(raw, str):
        return (text(raw),)
    if not isinstance(raw, Sequence):
        raise ValueError("not a list of texts")
    return tuple(text(item) for item in raw)


def cache_folders(raw: Any) -> tuple[str, ...]:
    """Return folders of a node in one spelling, `~/…` or seen from the workdir, each once."""
    home, workdir = os.path.expanduser("~"), os.getcwd()  # noqa: PTH109, PTH111 - texts
    found = [cache_folder(each, home=home, workdir=workdir) for each in texts(raw)]
    return tuple(dict.fromkeys(found))


def hooks(raw: Any) -> tuple[str, ...]:
    """Return URLs to tell; no error says what was given, for such a URL is a secret."""
    urls = texts(raw)
    for url in urls:
        scheme, divided, rest = url.partition("://")
        if not divided or not rest or not _SCHEME.fullmatch(scheme):
            raise ValueError("given something else")
        if scheme in ("http", "https") and not urlsplit(url).hostname:
            raise ValueError("given something else")
    return urls


def alert_topics(raw: Any) -> tuple[str, ...]:
    """Return what people want to hear of, in one spelling: `budget 50,80`, `no-save 3600s`.

    A topic with a limit has it behind its name: shares of the budget in percent, USD an hour, or a
    duration.
    """
    topics = tuple(_topic(text(item)) for item in texts(raw))
    if len({topic.split()[0] for topic in topics}) < len(topics):
        raise ValueError("a topic is named twice")
    return topics


def _topic(raw: str) -> str:
    name, _, limit = raw.lower().replace("_", "-").partition(" ")
    limit = limit.strip()
    if name in PLAIN_TOPICS and not limit:
        return name
    if name == BUDGET_TOPIC:
        parts = [part.strip().removesuffix("%").strip() for part in limit.split(",")]
        shares = [Whole(1, 100)(part) for part in parts] if limit else BUDGET_SHARES
        return f"{name} {','.join(str(share) for share in sorted(set(shares)))}"
    if name == BURN_TOPIC:
        return f"{name} {usd(limit.removesuffix('/h')):g}"
    if name in PATIENT_TOPICS:
        return f"{name} {seconds_text(duration(limit))}"
    raise ValueError("not a topic")


def run_name(raw: Any) -> str:
    """Return a name that can be part of a run id, a cluster name and a folder."""
    name = text(raw)
    if not _NAME.fullmatch(name):
        raise ValueError("not a name")
    return name


def sanitized_name(raw: str) -> str:
    """Return the allowed name that is most like `raw`."""
    name = re.sub(r"[^a-z0-9]+", "-", raw.lower()).strip("-")
    return name[:MAX_NAME_CHARS].strip("-") or "job"


def save_interval(raw: Any) -> str:
    """Return `auto`, `<seconds>s` or `<n> steps`: one spelling for each meaning."""
    if isinstance(raw, str):
        words = " ".join(raw.lower().split())
        if words == "auto":
            return words
        if steps := _STEPS.fullmatch(words):
            return f"{number(steps[1]):.0f} steps"
    return seconds_text(duration(raw))


def seconds_text(seconds: float) -> str:
    """Return a duration as it can be written in a file: `90s`, `0.5s`."""
    return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"


def variables(raw: Any) -> dict[str, str]:
    """Return the user's variables for the job, sorted. Errors never hold a value: it may be secret.

    Raises:
        ValueError: a name or value cannot be one, or the name is spotguard's own.
    """
    if not isinstance(raw, Mapping):
        raise ValueError("not a table")
    return {name: _variable(name, raw[name]) for name in sorted(raw)}


def _variable(name: str, value: object) -> str:
    if not _VARIABLE.fullmatch(name):
        raise ValueError(f"{name!r} is no name for a variable")
    if name in JOB_VARIABLES - VARIABLES_FOR_USERS:
        raise ValueError(f"{name} is set by spotguard itself")
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError(f"the value of {name} is not a text")
    if "\0" in str(value):
        raise ValueError(f"the value of {name} holds a zero byte")
    return str(value)
