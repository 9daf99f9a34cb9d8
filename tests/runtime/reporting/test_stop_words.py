"""What a node takes the controller's word to stop for."""

from __future__ import annotations

import json

import pytest

from spotguard.control.supervisor.request import ask_to_stop
from spotguard.events import keys
from spotguard.events.states import EndReason
from spotguard.runtime.reporting.node_reports import parse_stop
from spotguard.testing.stores import MemoryStore


@pytest.mark.parametrize("reason", [EndReason.MOVED, EndReason.STOPPED, EndReason.BUDGET])
def test_it_is_what_was_asked(reason: EndReason) -> None:
    """And an older spotguard on the nodes knows the word, so that it is not the user's stop."""
    store = MemoryStore()
    ask_to_stop(store, 1, reason)
    raw = store.get(keys.stop(1))
    assert parse_stop(raw).reason is reason
    older = EndReason(json.loads(raw)["reason"])
    assert older.retried is reason.retried
    assert older is not EndReason.MOVED, "the version before has no such word"


def test_a_word_of_a_later_version_is_not_needed() -> None:
    """The word that all know counts then."""
    raw = json.dumps({"reason": "resized", "exact_reason": "teleported"}).encode()
    assert parse_stop(raw).reason is EndReason.RESIZED
