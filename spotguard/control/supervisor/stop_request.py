"""What a job is asked by its run store."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from spotguard.errors import AlreadyExists
from spotguard.events import keys

if TYPE_CHECKING:
    from spotguard.events.states import EndReason
    from spotguard.storage.base import ObjectStore

log = logging.getLogger(__name__)


def ask_to_stop(store: ObjectStore, attempt: int, reason: EndReason) -> None:
    """Have an attempt save and stop; the first one who asks says why.

    Raises:
        StoreError: it cannot be asked.
    """
    body = {"reason": reason.value, "message": f"asked to stop: {reason.told(None)}"}
    try:
        store.put(keys.stop(attempt), json.dumps(body).encode(), if_absent=True)
    except AlreadyExists:
        log.info("attempt %s has been asked to stop before", attempt)
