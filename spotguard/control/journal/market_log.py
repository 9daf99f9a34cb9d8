"""`market.jsonl` in spotguard's home: what own runs saw of spot markets. It stays on this machine.

Several controllers append to it at once, under a lock; it holds a megabyte at most. When it is full
prices go first, which can be had again, but the newest of each place; if that is not enough, the
older half of all goes. Whatever makes no sense in it is passed over.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from spotguard.events.untrusted import (
    Refused,
    amount,
    integer,
    needed,
    parse_object,
    seconds,
    text,
)
from spotguard.policy.market.sightings import KINDS, PRICE, Sighting
from spotguard.spec.home_folder import spotguard_home

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

log = logging.getLogger(__name__)

MOST_BYTES: Final = 1 << 20
_LONGEST_LINE: Final = 2000
_ROOMY: Final = 0.75
"""A file that is no fuller than this has room for the lines of some time."""
_LONGEST_WORD: Final = 300


def market_path(home: Path | None = None) -> Path:
    """Return the file; it need not exist."""
    return (home or spotguard_home()) / "market.jsonl"


def read_market(path: Path) -> tuple[Sighting, ...]:
    """Return all sightings, by time; none if there is no file, or it cannot be read."""
    try:
        with path.open("rb") as file:
            raw = file.read(2 * MOST_BYTES)
    except OSError:
        return ()
    found = []
    for line in raw.splitlines():
        with suppress(Refused):
            found.append(_sighting(line))
    return tuple(sorted(found, key=lambda each: each.at))


def note_market(path: Path, sightings: Sequence[Sighting]) -> None:
    """Append sightings, if the file can be written; what cannot be kept is lost without harm."""
    if not sightings:
        return
    lines = b"".join(
        json.dumps(_plain(each), separators=(",", ":")).encode() + b"\n" for each in sightings
    )
    try:
        with _locked(path) as descriptor:
            if os.fstat(descriptor).st_size + len(lines) > MOST_BYTES:
                _rewrite(descriptor, _worth_keeping(_read_all(descriptor) + lines))
            else:
                os.lseek(descriptor, 0, os.SEEK_END)
                os.write(descriptor, lines)
    except OSError as problem:
        log.warning("%s: %s", path, problem)


def _plain(sighting: Sighting) -> dict[str, object]:
    body = {name: value for name, value in asdict(sighting).items() if value not in (None, "")}
    return {"v": 1, **body}


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _read_all(descriptor: int) -> bytes:
    os.lseek(descriptor, 0, os.SEEK_SET)
    raw = b""
    while piece := os.read(descriptor, 1 << 20):
        raw += piece
    return raw


def _worth_keeping(raw: bytes) -> bytes:
    """Return the lines that fit into half of the file, in their order."""
    lines = [line for line in raw.splitlines(keepends=True) if len(line) <= _LONGEST_LINE]
    priced = {index: place for index, line in enumerate(lines) if (place := _priced(line))}
    newest = set({place: index for index, place in priced.items()}.values())
    _drop_oldest(lines, [index for index in priced if index not in newest])
    if sum(map(len, lines)) > _ROOMY * MOST_BYTES:
        _drop_oldest(lines, [index for index in range(len(lines)) if index not in newest])
        _drop_oldest(lines, sorted(newest))
    return b"".join(lines)


def _drop_oldest(lines: list[bytes], indices: Iterable[int]) -> None:
    """Empty so many of these lines, from the first on, that half of the file is enough."""
    size = sum(map(len, lines))
    for index in indices:
        if size <= MOST_BYTES // 2:
            return
        size -= len(lines[index])
        lines[index] = b""


def _priced(line: bytes) -> str | None:
    """Return the place whose price a line tells; None if it is something else."""
    with suppress(Refused):
        sighting = _sighting(line)
        return sighting.place if sighting.kind == PRICE else None
    return None


def _rewrite(descriptor: int, raw: bytes) -> None:
    """Replace the content in place: others hold the same file open, and wait for its lock."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, raw)
    os.ftruncate(descriptor, len(raw))


def _sighting(line: bytes) -> Sighting:
    body = parse_object(line, "a sighting", most_bytes=_LONGEST_LINE)
    if integer(body, "v") != 1:
        raise Refused("it is of another version")
    kind = needed(_word(body.get("kind"), KINDS), "kind")
    return Sighting(
        at=needed(seconds(body, "at"), "instant"),
        kind=kind,
        place=needed((text(body, "place") or "")[:_LONGEST_WORD] or None, "place"),
        accelerator=(text(body, "accelerator") or "")[:_LONGEST_WORD],
        gpus=integer(body, "gpus", low=1, high=1024) or 1,
        nodes=integer(body, "nodes", low=1, high=100_000) or 1,
        market=_word(body.get("market"), ("spot", "on_demand")) or "spot",
        usd_per_h=amount(body, "usd_per_h"),
        age_s=amount(body, "age_s"),
        run=(text(body, "run") or "")[:_LONGEST_WORD],
        attempt=integer(body, "attempt", low=1),
    )


def _word(value: object, allowed: Iterable[str]) -> str | None:
    return value if isinstance(value, str) and value in allowed else None
