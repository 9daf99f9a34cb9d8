"""Guess what a mistyped word was meant to be."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that looks most like `word`, or None when none is close."""
    words = sorted(known)
    lowered = {known_word.lower(): known_word for known_word in words}
    close = get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
    return lowered[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint for a mistyped word: the nearest known one, else all of them."""
    words = sorted(known)
    match = nearest(word, words)
    return f"did you mean {match!r}?" if match else f"known are: {', '.join(words)}"
