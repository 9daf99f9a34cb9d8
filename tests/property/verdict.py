"""What is wrong with a run, in sentences: on the way, and at its end beside the undisturbed one."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from spotguard.testing import read_sample_trace
from tests.property.child.moments import ONCE
from tests.property.play import TOLD, is_frozen_outside
from tests.property.scripts import NEEDS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.property.play import Attempt, Play
    from tests.property.scripts import Script

RELATIVE, ABSOLUTE = 2e-3, 2e-4
"""How far numbers may lie from another number of ranks' where only rounding may differ."""
SAID_AS = {
    "notice": {"preempted"},
    "term-one": {"terminated"},
    "term-all": {"terminated"},
    "term-repeated": {"terminated"},
    "term-then-kill": {"terminated", "node_lost"},
    "int-all": {"stopped", "node_lost"},
    "kill-one": {"node_lost"},
    "kill-all": {"node_lost"},
    "freeze": {"node_lost"},
    "wake": {"node_lost"},
    "stop": {"stopped"},
    "raise": {"failed", "terminated", "node_lost"},  # torchrun ends the others
}
NOTHING_LOST = {"notice", "term-one", "term-all", "term-repeated", "stop"}
"""After these the checkpoint is that of the very last step."""
KILLS_ALL = {"kill-all", "term-then-kill"}
KILLS = {"kill-one", "freeze", "wake", *KILLS_ALL}


@dataclass
class End:
    """What a finished run came to."""

    states: list[dict[str, Any]]
    """Of each rank, all that it tracked."""
    samples: list[tuple[int, int, list[int]]]
    """Of each step: its number, its epoch, its samples."""
    said: str = ""
    counts: list[dict[str, int]] = field(default_factory=list)
    seconds: float = 0.0


def end_of(folder: Path, attempt: int, world: int) -> End:
    """Return what the last attempt of a finished run left."""
    states, counts = [], []
    for rank in range(world):
        with np.load(folder / f"final-{attempt}-{rank}.npz", allow_pickle=False) as file:
            states.append(dict(file))
        path = folder / f"counts-{attempt}-{rank}.json"
        counts.append(json.loads(path.read_text())["counts"])
    trace = folder / "samples.jsonl"
    steps = read_sample_trace(trace) if trace.exists() else []
    samples = [(step.step, step.epoch, step.samples) for step in steps]
    return End(states, samples, counts=counts)


def refusal_in(said: str) -> str:
    """Return the sentence by which spotguard refused something, with its way out; else ''."""
    found = re.search(r"^spotguard: (?:\S+:\d+: )?(.* \(.+\))$", said, re.MULTILINE)
    return found[1] if found else ""


# ------------------------------------------------------------------ on the way


def wrong_on_the_way(play: Play) -> list[str]:
    """Return what its attempts said or did that is not so, or not promised."""
    if play.hangs:
        return [play.hangs]
    found: list[str] = []
    for attempt in play.attempts:
        found += [f"attempt {attempt.number}: {what}" for what in _of_attempt(attempt)]
        if attempt.finished and _was_deaf(attempt, play.planned):
            at = f"{attempt.life.kind} in step {attempt.was_at}"
            found.append(f"attempt {attempt.number}: {at}, and it trained on to the end")
    if not found and not play.attempts[-1].finished:
        found.append(f"it never finished: {play.attempts[-1].codes}")
    return found


def _of_attempt(attempt: Attempt) -> list[str]:
    found = []
    for event in attempt.events:
        if event.kind == "started" and event.data["resumed_step"] < attempt.saved_before:
            resumed, saved = event.data["resumed_step"], attempt.saved_before
            found.append(f"it goes on from step {resumed}, but step {saved} was told as saved")
    found += [f"it names {prefix}, which is not there" for prefix in attempt.missing]
    if any("Traceback (most recent" in said for said in attempt.said) and not _may_raise(attempt):
        found.append("it shows a traceback that is nobody's")
    if attempt.finished:
        return found
    if not attempt.life.kind or not attempt.struck:
        return [*found, f"nobody disturbed it, and it ended with {attempt.codes}"]
    return found + _codes(attempt) + _words(attempt)


def _was_deaf(attempt: Attempt, steps: int) -> bool:
    """Return whether it was told to stop long before its last step, and has done all of them."""
    told = attempt.life.kind in NOTHING_LOST and attempt.life.at not in ONCE
    reasons = {end["reason"] for end in attempt.ends}
    return told and 0 <= attempt.was_at < steps - 5 and reasons <= {"finished"}


def _may_raise(attempt: Attempt) -> bool:
    # A collective that a peer left raises in the script, and Ctrl-C does.
    return attempt.life.kind in {"raise", "int-all", *KILLS} or attempt.life.world > 1


def _codes(attempt: Attempt) -> list[str]:
    life = attempt.life
    for rank, code in enumerate(attempt.codes):
        may_be = {TOLD, 0}
        if life.kind in KILLS and (rank == life.victim or life.kind in KILLS_ALL):
            may_be.add(-signal.SIGKILL)
        elif life.kind == "raise":
            may_be = {1} if rank == life.victim else {0, 1, TOLD, -signal.SIGTERM}
        if life.at == "set-up":
            may_be |= {-signal.SIGTERM, 143, 130, -signal.SIGINT, 1}
        if is_frozen_outside(life):
            may_be |= {-signal.SIGTERM, 143, -signal.SIGKILL}
        if life.kind == "int-all":
            may_be |= {130, 1, -signal.SIGINT}
        if code not in may_be:
            return [f"{life.kind} at {life.at}: the codes are {attempt.codes}"]
    return []


def _words(attempt: Attempt) -> list[str]:
    life, ends = attempt.life, attempt.ends
    assert life.kind
    if life.kind == "kill-all" or life.at == "set-up":
        return []
    found = []
    reasons = {end["reason"] for end in ends}
    of_others = life.kind in {"kill-one", "freeze", "wake"}
    silent = life.kind in {"term-then-kill", "int-all"} or (of_others and life.world == 1)
    silent = silent or life.at in {"restored", "after-loop"}
    may_be = SAID_AS[life.kind] | {"finished"}  # on the last step all may be done
    if not reasons <= may_be or not (reasons or silent):
        found.append(f"{life.kind} at {life.at}: told as {sorted(reasons)}")
    for end in ends:
        if (
            life.kind in NOTHING_LOST
            and max(end["saved_step"] or 0, end["resumed_step"] or 0) != end["step"]
        ):
            told = f"saved {end['saved_step']} of {end['step']}: {end['message']}"
            found.append(f"{life.kind} at {life.at}: {told}")
    return found


# ------------------------------------------------------------------ the end


def wrong_at_the_end(script: Script, ours: End, calm: End, *, same_world: bool) -> list[str]:
    """Return how the end differs from the undisturbed one's, beyond what is promised."""
    found = []
    promise = "bits" if same_world else script.elastic
    promise = "rounding" if promise == "first" else promise
    samples = [_sorted(end.samples) for end in (ours, calm)]
    if promise == "once":
        found += _once(ours)
    elif samples[0] != samples[1]:
        found.append(f"other samples than undisturbed: {_first_difference(*samples)}")
    if promise in ("bits", "rounding"):
        for rank, state in enumerate(ours.states):
            undisturbed = calm.states[rank if same_world else 0]
            names = _told_by_ranks if script.server in NEEDS and not same_world else _told_by_time
            pair = [
                {k: v for k, v in each.items() if not names(k)} for each in (state, undisturbed)
            ]
            found += _differences(rank, *pair, bitwise=promise == "bits")
            if found or not same_world:
                break
    return found


def _timeless(value: Any) -> bytes:
    """Return the bytes without times, and without what the docs call not promised."""
    return re.sub(rb'"(\w*runtime|\w*_per_second|total_flos)":[^,}]*', b"", value.tobytes())


def _told_by_time(name: str) -> bool:
    """Return whether it is a time or a rate, which no two runs have in common."""
    return re.search(r"runtime|_per_second|trained_s|total_flos|_ranks$|\*\._", name) is not None


def _told_by_ranks(name: str) -> bool:
    """Return whether a framework counts it by its own batches, so that ranks have their own."""
    return not name.startswith(("model.", "module.", "optimizer."))


def _sorted(samples: list[tuple[int, int, list[int]]]) -> list[tuple[int, int, list[int]]]:
    return [(step, epoch, sorted(each)) for step, epoch, each in samples]


def _once(end: End) -> list[str]:
    seen = [(epoch, sample) for _, epoch, samples in end.samples for sample in samples]
    return ["an epoch has samples twice"] if len(seen) != len(set(seen)) else []


def _first_difference(ours: list[Any], calm: list[Any]) -> str:
    for mine, other in zip(ours, calm, strict=False):
        if mine != other:
            return f"step {mine[0]} of epoch {mine[1]} has {mine[2]}, undisturbed {other}"
    return f"{len(ours)} steps, undisturbed {len(calm)}"


def _differences(
    rank: int, ours: dict[str, Any], calm: dict[str, Any], *, bitwise: bool
) -> list[str]:
    if sorted(ours) != sorted(calm):
        odd = sorted(set(ours) ^ set(calm))
        return [f"rank {rank}: only one of the two ends has {', '.join(odd[:5])}"]
    found = []
    for name, value in ours.items():
        other = calm[name]
        if _agree(value, other, bitwise=bitwise):
            continue
        off = ""
        if value.shape == other.shape and value.dtype.kind in "fiub":
            off = f" by {np.abs(value.astype(float) - other.astype(float)).max():.3g}"
        found.append(f"rank {rank}: {name} differs{off}")
    return found[:6]


def _agree(one: Any, other: Any, *, bitwise: bool) -> bool:
    if one.dtype != other.dtype or (one.shape != other.shape and one.dtype != np.uint8):
        return False
    if one.dtype == np.uint8:  # texts, too, in which a framework may keep times
        return _timeless(one) == _timeless(other)
    if bitwise or one.dtype.kind not in "fc":
        return bool(one.tobytes() == other.tobytes())
    return bool(np.allclose(one, other, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True))
