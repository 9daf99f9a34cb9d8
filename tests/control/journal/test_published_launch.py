"""What the run store says of launches that came to nothing."""

from __future__ import annotations

import json

import pytest

from spotguard.control.journal.stored.published_launch import Over, launched_numbers
from spotguard.events import keys
from spotguard.testing import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    """A run of which the second launch was refused, and the third given up."""
    made = MemoryStore()
    made.put(keys.launch(1), b"{}")
    for number, over in ((2, Over.REFUSED), (3, Over.GIVEN_UP)):
        made.put(keys.launch(number), json.dumps({"over": over.value}).encode())
    return made


def test_what_came_to_nothing_is_no_attempt(store: MemoryStore) -> None:
    """Newest first."""
    assert list(launched_numbers(store)) == [1]


@pytest.mark.parametrize("key", [keys.claim(2), keys.end(2)])
def test_a_refused_number_whose_nodes_came_later_is_an_attempt(
    store: MemoryStore, key: str
) -> None:
    """The word of its next launch did not reach the store; its job's own did."""
    store.put(key, b"{}")
    assert list(launched_numbers(store)) == [2, 1]
