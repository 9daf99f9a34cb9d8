"""Reads a trace that a job stored, as torch.profiler writes it, without trust. Pure."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from spotguard.events.profile import STEP
from spotguard.events.untrusted import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator

BACKWARD: Final = "autograd::engine"
MOST_RAW_BYTES: Final = 256 << 20
"""Of a trace when it is unpacked; the job stores smaller ones."""
_MOST_SPANS = 2_000_000
_LONGEST_NAME = 200
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LATEST_US = 1e18


class Span(NamedTuple):
    """A piece of time, in microseconds, and what was done in it."""

    start: float
    end: float
    name: str


@dataclass(frozen=True)
class StepTrace:
    """What happened in the recorded steps."""

    steps: list[Span]
    """By time."""
    loop: list[Span]
    """What the loop's thread did within them; spans lie within each other, or apart."""
    backward: list[Span]
    """What another thread did of the backward passes, where a GPU is: the loop's waits for it."""
    device: list[Span]
    """What the GPU did; nothing where there is none."""


def unpack(packed: bytes) -> bytes:
    """Return the JSON of a stored trace.

    Raises:
        Refused: it is not packed by gzip, cut off, or larger than any that a job stores.
    """
    unpacker = zlib.decompressobj(wbits=31)
    try:
        raw = unpacker.decompress(packed, MOST_RAW_BYTES)
    except zlib.error:
        raise Refused("the trace is damaged") from None
    if not unpacker.eof:
        raise Refused("the trace is cut off, or too large")
    return raw


def read_trace(raw: bytes, *, whole: int | None = None) -> StepTrace:
    """Return what a trace tells of the loop's thread and of the GPU.

    `whole`: as many steps count, where the recording ended within one more.

    Raises:
        Refused: it makes no sense, or has no recorded step that took time.
    """
    try:
        body = json.loads(raw)
        events = body["traceEvents"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise Refused("the trace makes no sense") from None
    if not isinstance(events, list) or len(events) > _MOST_SPANS:
        raise Refused("the trace makes no sense")
    found = list(_spans(events))
    threads = Counter(thread for _, thread, span in found if span.name == STEP)
    if not threads:
        raise Refused("the trace has no step")
    [(loop, _)] = threads.most_common(1)
    mine = [span for kind, thread, span in found if kind == "loop" and thread == loop]
    steps = sorted(span for span in mine if span.name == STEP)[:whole]
    if not sum(span.end - span.start for span in steps) > 0:
        raise Refused("the trace has no step that took time")
    first, last = steps[0].start, steps[-1].end
    within = [span for span in mine if span.start >= first and span.end <= last]
    device = [span for kind, _, span in found if kind == "device" and span.end > first]
    engines = {t for kind, t, span in found if kind == "loop" and span.name.startswith(BACKWARD)}
    engine = next((thread for thread in sorted(engines) if thread != loop), None)
    return StepTrace(
        steps=steps,
        loop=within,
        backward=[s for kind, thread, s in found if kind == "loop" and thread == engine],
        device=[span for span in device if span.start < last],
    )


def _spans(events: list[Any]) -> Iterator[tuple[str, tuple[str, str], Span]]:
    """Yield what has a duration: on a thread of the process, or on the GPU."""
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        start, duration, name = event.get("ts"), event.get("dur"), event.get("name")
        if not (isinstance(start, (int, float)) and isinstance(duration, (int, float))):
            continue
        if not (0 <= start < _LATEST_US and 0 <= duration < _LATEST_US):
            continue
        kind = event.get("cat")
        if not isinstance(name, str) or not isinstance(kind, str) or kind == "Trace":
            continue
        place = "device" if kind in _ON_DEVICE else "loop"
        if kind.startswith("gpu_user"):
            continue  # the same names once more, on the GPU's own line
        thread = (str(event.get("pid")), str(event.get("tid")))
        yield place, thread, Span(start, start + duration, name[:_LONGEST_NAME])
