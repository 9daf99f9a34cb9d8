"""`plan --probe`: what sizes of micro-batches take in memory and in time, in a smoke's way.

One process of the script on this machine's CPU, in a folder and a store of its own, tries sizes as
`micro_batch_size="auto"` does, under a limit of memory that stands in for a device's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil

from spotguard.control.drill.smoke.trial import (
    WRITTEN_TO,
    cannot_be_tried,
    check_possible,
    run_trial,
)
from spotguard.errors import EnvironmentFailure, UsageError
from spotguard.events import env
from spotguard.events.untrusted import (
    Refused,
    amount,
    integer,
    needed,
    objects,
    parse_object,
    text,
)
from spotguard.policy.plan.batch_curve import BatchCurve, TriedSize
from spotguard.shared.units import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.control.drill.smoke.trial import Trial
    from spotguard.spec.model import JobSpec

_SUBJECT = "Micro-batches"
_OF_FREE = 0.8
"""What of this machine's free memory is used when nobody says how much."""


def try_batches(
    spec: JobSpec, tell: Callable[[str], None], *, memory_bytes: int | None = None
) -> BatchCurve:
    """Try sizes of the script's micro-batches. Blocks for two minutes at most.

    Args:
        spec: the job; a step's samples are shared out over the ranks of its fewest nodes.
        tell: hears what is done.
        memory_bytes: what the process may have; None: most of what is free here.

    Raises:
        UsageError: the script gives its micro-batches a size itself, or this machine has less
            memory.
        SmokeFailed: the script does not work; names file and line.
        EnvironmentFailure: nothing can be measured here; says why.
    """
    check_possible(spec, _SUBJECT)
    memory_bytes = _memory(memory_bytes)
    ranks = spec.nodes.min * spec.nproc_per_node
    tell(
        "probe: sizes of micro-batches are tried on this machine's CPU, in "
        f"{format_bytes(memory_bytes)} of memory ..."
    )
    asked = f"{memory_bytes}:{ranks}:{WRITTEN_TO}"
    return _curve(run_trial(spec, env.TRY_BATCH, asked), ranks)


def _memory(asked: int | None) -> int:
    free = int(psutil.virtual_memory().available * _OF_FREE)
    if asked is not None and asked > free:
        raise UsageError(
            f"--probe-memory: {format_bytes(asked)} are more than this machine can give, which is "
            f"{format_bytes(free)}",
            hint="name less: what a sample takes is told, and is the same in more memory",
        )
    return asked or free


def _curve(trial: Trial, ranks: int) -> BatchCurve:
    facts, code = trial.facts, trial.code
    try:
        told = {} if trial.written is None else parse_object(trial.written, "the sizes")
        if told.get("is_whole") is True or (facts.ended_for == "time" and told.get("tried")):
            return curve_of(told, ranks=ranks)
        problem = text(told, "problem")
    except Refused as wrong:
        raise EnvironmentFailure(f"What the sizes took makes no sense: {wrong}.") from None
    if facts.ended_for == "time":
        place, _ = code.in_stacks(facts.stacks)
        late = "the first size is not tried" if told else "no loop with a loader is reached"
        took = format_duration(facts.seconds)
        raise cannot_be_tried(_SUBJECT, f"{code.told(place)}: {late} after {took} on this CPU")
    if problem:
        raise UsageError(
            f"--probe: {code.told(code.call_of('loader', 'stream'))}: {problem}",
            hint='run.loader(..., micro_batch_size="auto", probe=lambda batch: LOSS) lets sizes be '
            "tried; with a number, `plan --global-batch N --micro-batch N` shows what it means",
        )
    raise trial.why_not(_SUBJECT, "the script ended before its loop")


def curve_of(told: dict[str, Any], *, ranks: int) -> BatchCurve:
    """Return what a job wrote down.

    Raises:
        Refused: it makes no sense.
    """
    tried = [
        TriedSize(
            samples=needed(integer(each, "samples", low=1), "size"),
            fits=each.get("fits") is True,
            peak_bytes=integer(each, "peak_bytes", low=1),
            pass_s=amount(each, "pass_s"),
        )
        for each in objects(told, "tried")
    ]
    return BatchCurve(
        memory_bytes=needed(integer(told, "memory_bytes", low=0), "limit of memory"),
        kept_free_bytes=integer(told, "kept_free_bytes", low=0),
        global_batch_size=needed(integer(told, "global_batch_size", low=1), "batch"),
        ranks=ranks,
        most=needed(integer(told, "most", low=1), "share of a rank"),
        chosen=integer(told, "chosen", low=0),
        tried=tuple(sorted(tried, key=lambda each: each.samples)),
    )
