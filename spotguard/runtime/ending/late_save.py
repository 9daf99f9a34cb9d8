"""The last save of ranks that are all late: one of them makes it, the others wait for its word.

Each of them holds all of the state. If all stored it at once, the time for one copy would be spent
on as many copies as there are ranks, over one network, and every GPU's by way of pinned memory.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.errors import SpotguardError
    from spotguard.runtime.checkpoint.saver import Saver
    from spotguard.runtime.distributed.rendezvous import Coordinator

log = logging.getLogger("spotguard")

_NOT_SAVED = "-"
_LOOK_UP_S = 0.25
_ANSWER_S = 2.0


def save_by_one(
    words: Coordinator,
    saver: Saver,
    save: Callable[[], SpotguardError | None],
    *,
    rank: int,
    step: int,
    patience_s: float,
) -> SpotguardError | None:
    """Save the state after `step`, or wait for the rank that does; return what went wrong.

    This rank saves it, too, if that one says that it could not, is gone or cannot be heard, or says
    nothing within `patience_s`.
    """
    words.hurry(min(_ANSWER_S, patience_s))
    key = f"late-save/{step}"
    try:
        writer = words.first(key, str(rank))
        if writer != str(rank):
            log.info("rank %s saves step %d", writer, step)
            checkpoint = _heard(words, saver, f"{key}/done", patience_s)
            if checkpoint is None:
                return save()
            saver.take_from_other(step, checkpoint)
            return None
    except ConnectionError:
        return save()
    problem = save()
    last = saver.last
    saved = problem is None and last is not None and last.step == step
    try:
        words.set(f"{key}/done", last.checkpoint if saved and last is not None else _NOT_SAVED)
    except ConnectionError:
        log.debug("the rendezvous ended first")
    return problem


def _heard(words: Coordinator, saver: Saver, key: str, patience_s: float) -> str | None:
    """Return the checkpoint that the writer made; None if there is none, or no word of it."""
    end = time.monotonic() + patience_s
    while not saver.alone.is_set() and (left_s := end - time.monotonic()) > 0:
        said = words.get(key, min(left_s, _LOOK_UP_S))
        if said is not None:
            return None if said == _NOT_SAVED else said
    return None
