"""What is kept of a state at each boundary is a copy, whatever the script then changes in place."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

from spotguard.runtime.state.frozen import NotPlainError, TooLargeError, frozen
from spotguard.runtime.state.tree import Packed, pack

ROOM = 1 << 20


def packed(state: Any) -> tuple[Any, dict[str, list[Any]]]:
    """Return what would be stored of a state: its tree, and its tensors by name."""
    into = Packed()
    tree = pack(state, "it", into)
    return tree, {name: leaf.tensor.tolist() for name, leaf in into.leaves.items()}


def test_it_is_stored_as_it_was() -> None:
    """Lists that grow, dicts, and tensors that are added to do not reach what was kept."""
    tensor = torch.arange(3)
    state: dict[str, Any] = {
        "rates": [0.1, [0.2]],
        "by group": {0: "a", 1: (None, True, tensor)},
        "again": tensor,
        "inf": float("inf"),
        "bytes": b"\x00",
    }
    before = packed(state)
    kept = frozen(state, most_bytes=ROOM)
    state["rates"][1].append(3)
    state["by group"][2] = "new"
    tensor += 1

    assert packed(kept) == before
    assert list(before[1]) == ["it.by group.1.2"], "a tensor that comes twice is stored once"


@pytest.mark.parametrize(
    "state",
    [
        collections.OrderedDict(a=1),
        {"a": object()},
        {(1, 2): 1},
        [1 << 70],
        torch.zeros(2).to_sparse(),
        {"a": {1, 2}},
    ],
    ids=lambda state: type(state).__name__,
)
def test_other_kinds_are_packed_by_whoever_asked(state: Any) -> None:
    """What is seldom, or cannot be stored, is left to those who know it, at this very step."""
    with pytest.raises(NotPlainError):
        frozen(state, most_bytes=ROOM)


def test_what_holds_itself_is_not_walked_for_ever() -> None:
    """It is refused as what cannot be stored, by whoever packs it."""
    state: list[Any] = []
    state.append(state)
    with pytest.raises(NotPlainError):
        frozen(state, most_bytes=ROOM)


def test_large_tensors_are_not_copied() -> None:
    """All tensors together count; the limit itself is allowed."""
    one = torch.zeros(ROOM // 4, dtype=torch.int16)
    frozen([one, one, one.clone()], most_bytes=ROOM)
    with pytest.raises(TooLargeError):
        frozen([one, one.clone(), one.clone()], most_bytes=ROOM)


@pytest.mark.parametrize("number", [0, -1, 2**32 - 1, 2**32, 2**63 - 1, -(2**63) + 1])
def test_a_whole_number_that_can_be_stored_is_kept(number: int) -> None:
    """On its own, in a dict and in a list, of either sign."""
    state = {"alone": number, "in": [number, (number,)]}
    assert frozen(state, most_bytes=0) == state


@pytest.mark.parametrize("number", [2**63, -(2**63), 2**64, 2**200])
def test_a_whole_number_that_is_too_long_is_for_who_packs_it(number: int) -> None:
    """Wherever it stands."""
    for state in ({"count": number}, [number], {"in": {"count": number}}):
        with pytest.raises(NotPlainError):
            frozen(state, most_bytes=0)
