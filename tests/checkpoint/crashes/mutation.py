"""Bytes that nobody wrote: valid documents, mutated by a seeded chance; and a guard for readers."""

from __future__ import annotations

import random
import re
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_TOKENS = (
    *(b"{}", b"[]", b"null", b"true", b'""', b"-", b"1e999", b"NaN", b'{"$float":"nan"}', b","),
    *(b'"__metadata__"', b'"global_shape"', b'"schema"', b"\\ud800", b"\xff", b"\0", b"\xf0\x9f"),
)
_HUGE = (
    *(b"-1", b"0", b"1", b"255", b"4096", b"9007199254740993", b"9223372036854775807"),
    *(b"9223372036854775808", b"18446744073709551616", b"1" + b"0" * 300, b"7" * 500, b"1e308"),
)
_NUMBER = re.compile(rb"[0-9]+")
_MOST_S = 1.0
_MOST_BYTES = 4 << 20
_SAMPLE = 100
"""Of so many inputs one is measured for memory, which makes it ten times slower."""


def mutants(originals: Sequence[bytes], count: int, *, seed: int) -> Iterator[bytes]:
    """Yield `count` documents, each some original with one to four changes."""
    chance = random.Random(seed)
    numbers = [[found.span() for found in _NUMBER.finditer(raw)] for raw in originals]
    for _ in range(count):
        which = int(chance.random() * len(originals))
        out = bytearray(originals[which])
        swap = bool(numbers[which]) and chance.random() < 0.3
        if swap:
            low, high = chance.choice(numbers[which])
            out[low:high] = chance.choice(_HUGE)
        for _ in range(int(chance.random() * 3) + (not swap)):
            _change(out, originals, chance)
        yield bytes(out)


def _change(out: bytearray, originals: Sequence[bytes], chance: random.Random) -> None:
    at = int(chance.random() * (len(out) + 1))
    size = int(chance.random() * 12)
    match int(chance.random() * 6.03):
        case 0:
            if at < len(out):
                out[at] ^= 1 << int(chance.random() * 8)
        case 1:
            del out[at : at + size]
        case 2:
            out[at:at] = chance.choice(_TOKENS)
        case 3:
            if at < len(out):
                out[at] = chance.choice(b'0123456789-{}[]",:.e\\')
        case 4:  # splice: some of another place, or of another document
            other = chance.choice(originals)
            start = int(chance.random() * len(other))
            out[at : at + size] = other[start : start + int(chance.random() * 200)]
        case 5:
            out[at : at + size] = out[at : at + size] * 2
        case _:
            opening = chance.choice((b"[", b'{"a":', b'[{"":'))
            out[at:at] = opening * int(10 ** (1 + 4 * chance.random()))


def survive(
    read: Callable[[bytes], Any],
    inputs: Iterator[bytes],
    refusals: tuple[type[Exception], ...],
    check: Callable[[bytes, Any], None],
) -> tuple[int, int]:
    """Read all inputs; return how many were accepted, and how many there were.

    Each is refused by one of `refusals`, or passes `check(raw, what was read)`. No read takes more
    than a second of the processor, nor more memory than its input and a few megabytes.
    """
    accepted = number = 0
    for number, raw in enumerate(inputs, start=1):
        sampled = number % _SAMPLE == 0
        if sampled:
            tracemalloc.start()
        started = time.thread_time()
        try:
            found = read(raw)
        except refusals:
            pass
        except BaseException as problem:
            raise AssertionError(f"{type(problem).__name__} for {raw[:4000]!r}") from problem
        else:
            accepted += 1
            check(raw, found)
        assert time.thread_time() - started < _MOST_S, f"too slow: {raw[:4000]!r}"
        if sampled:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 10 * len(raw) + _MOST_BYTES, f"{peak} bytes for {raw[:4000]!r}"
    return accepted, number
