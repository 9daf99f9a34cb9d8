"""What the user asks of a run whose controller is on another machine: through the store alone.

Each wish is an object. Who serves the run carries it out as if it had been asked for there, and
then removes it; what cannot be done is answered in its place.
"""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spotguard.errors import EnvironmentFailure, NotFound, StoreError, UsageError
from spotguard.events import keys
from spotguard.events.masking import masked
from spotguard.events.untrusted import Refused, an_object, parse_object, text
from spotguard.storage.patterns.clock_comparison import store_now
from spotguard.storage.small_objects import get_small

if TYPE_CHECKING:
    from spotguard.shared.units import Clock
    from spotguard.storage.base import ObjectStore

STOP, DOWN, RESUME, LEAVE = "stop", "down", "resume", "leave"
KINDS = (STOP, DOWN, RESUME, LEAVE)
PATIENCE_S = 120.0
"""How long who serves the run may take to carry out a wish; a look is due every few seconds."""
OUTDATED_S = 2 * PATIENCE_S
"""Whoever asked is gone by then, and did not take it back."""
_POLL_S = 1.0


@dataclass(frozen=True, kw_only=True)
class AskedThere:
    """One thing that is asked for."""

    key: str
    kind: str
    data: dict[str, Any] = field(default_factory=dict)
    answer: str = ""
    """Why it was not done; empty while nobody has said so."""


def ask(store: ObjectStore, kind: str, clock: Clock, data: dict[str, Any] | None = None) -> None:
    """Ask for something and return once it is done; `store` is the run's own.

    Whatever ends the wait takes it back: nobody expects it to be done later.

    Raises:
        UsageError: it cannot be done; says why.
        EnvironmentFailure: nobody heard it in time.
        StoreError: the store cannot be written.
    """
    key = keys.wish(clock.now(), secrets.token_hex(4))
    wish = AskedThere(key=key, kind=kind, data=data or {})
    try:
        store.put(key, _written(wish), if_absent=True)
        _wait_until_done(store, wish, clock)
    except BaseException:
        with suppress(StoreError):
            store.delete(key)
        raise


def _wait_until_done(store: ObjectStore, wish: AskedThere, clock: Clock) -> None:
    give_up_at = clock.monotonic() + PATIENCE_S
    while clock.monotonic() < give_up_at:
        try:
            answer = _read(store, wish.key).answer
        except NotFound:
            return
        if answer:
            raise UsageError(answer)
        clock.sleep(_POLL_S)
    raise EnvironmentFailure(
        "The controller did not hear of it in time, so nothing was asked for.",
        hint=f"who has the run: spotguard controller status {store.url.rstrip('/')}",
    )


def unanswered(store: ObjectStore) -> list[AskedThere]:
    """Return what is still to be done, oldest first.

    What makes no sense is removed, and what is so old that nobody waits for it any more.

    Raises:
        StoreError: the store cannot be read.
    """
    listed = [info for info in store.list(keys.WISHES) if info.key != keys.WISHES_READ_AT]
    now = store_now(store, keys.WISHES_READ_AT) if listed else None
    found = []
    for info in sorted(listed, key=lambda each: each.key):
        key, at = info.key, info.modified_at
        if now is not None and at is not None and now - at > OUTDATED_S:
            store.delete(key)
            continue
        try:
            wish = _read(store, key)
        except NotFound:  # taken back
            continue
        except Refused:
            store.delete(key)
            continue
        if not wish.answer:
            found.append(wish)
    return found


def stands(store: ObjectStore, wish: AskedThere) -> bool:
    """Return whether it is still asked for.

    Raises:
        StoreError: the store cannot be read.
    """
    return store.head(wish.key) is not None


def done(store: ObjectStore, wish: AskedThere) -> None:
    """Take away a wish that was carried out."""
    store.delete(wish.key)


def refuse(store: ObjectStore, wish: AskedThere, why: str) -> None:
    """Answer a wish that cannot be carried out."""
    answered = AskedThere(key=wish.key, kind=wish.kind, data=wish.data, answer=why)
    store.put(wish.key, _written(answered))


def _written(wish: AskedThere) -> bytes:
    told = {"kind": wish.kind, "data": wish.data, "answer": wish.answer}
    return json.dumps(masked(told)).encode()


def _read(store: ObjectStore, key: str) -> AskedThere:
    body = parse_object(get_small(store, key), key)
    kind = text(body, "kind")
    if kind not in KINDS:
        raise Refused(f"{key} asks for something unknown")
    data = an_object(body.get("data") or {}, "what is asked for")
    return AskedThere(key=key, kind=kind, data=data, answer=text(body, "answer") or "")
