"""`plan --probe`: what sizes of micro-batches take in memory and in time, in a smoke's way.

One process of the script on this machine's CPU, in a folder and a store of its own, tries sizes as
`micro_batch_size="auto"` does, under a limit of memory that stands in for a device's.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, Final

import psutil

from spotguard.control.drill.smoke.places import Code
from spotguard.control.drill.smoke.process import Stint, run_stint
from spotguard.control.drill.smoke.run import lacking, room_for_smoke
from spotguard.control.drill.smoke.verdict import Stopped, judge
from spotguard.errors import EnvironmentFailure, SmokeFailed, UsageError
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
    from pathlib import Path

    from spotguard.control.drill.smoke.process import Facts
    from spotguard.errors import SpotguardError
    from spotguard.spec.model import JobSpec

LIMIT_S: Final = 120.0
_FOREVER = 10**9
_OF_FREE = 0.8
"""What of this machine's free memory is used when nobody says how much."""
_FILE = "batch.json"


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
    if lack := lacking(spec):
        raise EnvironmentFailure(f"Micro-batches cannot be tried: {lack}.")
    memory_bytes = _memory(memory_bytes)
    ranks = spec.nodes.min * spec.nproc_per_node
    tell(
        "probe: sizes of micro-batches are tried on this machine's CPU, in "
        f"{format_bytes(memory_bytes)} of memory ..."
    )
    folder = room_for_smoke()
    try:
        return _tried(spec, folder, memory_bytes, ranks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _memory(asked: int | None) -> int:
    free = int(psutil.virtual_memory().available * _OF_FREE)
    if asked is not None and asked > free:
        raise UsageError(
            f"--probe-memory: {format_bytes(asked)} are more than this machine can give, which is "
            f"{format_bytes(free)}",
            hint="name less: what a sample takes is told, and is the same in more memory",
        )
    return asked or free


def _tried(spec: JobSpec, folder: Path, memory_bytes: int, ranks: int) -> BatchCurve:
    stint = Stint(
        attempt=1,
        stop_after=_FOREVER,
        whole_batches=True,
        limit_s=LIMIT_S,
        variables={env.TRY_BATCH: f"{memory_bytes}:{ranks}:{{room}}/{_FILE}"},
    )
    facts = run_stint(spec, folder, stint)
    found = next(iter(folder.glob(f"*/{_FILE}")), None)
    try:
        told = {} if found is None else parse_object(found.read_bytes(), "the sizes")
        if told.get("is_whole") is True or (facts.ended_for == "time" and told.get("tried")):
            return curve_of(told, ranks=ranks)
        problem = text(told, "problem")
    except Refused as wrong:
        raise EnvironmentFailure(f"What the sizes took makes no sense: {wrong}.") from None
    code = Code(spec.script, spec.workdir)
    if facts.ended_for == "time":
        place, _ = code.in_stacks(facts.stacks)
        late = "the first size is not tried" if told else "no loop with a loader is reached"
        raise EnvironmentFailure(
            f"Micro-batches cannot be tried: {code.told(place)}: {late} after "
            f"{format_duration(facts.seconds)} on this CPU."
        )
    raise _why_not(spec, code, facts, problem)


def _why_not(spec: JobSpec, code: Code, facts: Facts, problem: str | None) -> SpotguardError:
    """Return why a script that ended by itself has no curve."""
    if problem:
        return UsageError(
            f"--probe: {code.told(code.call_of('loader', 'stream'))}: {problem}",
            hint='run.loader(..., micro_batch_size="auto", probe=lambda batch: LOSS) lets sizes be '
            "tried; with a number, `plan --global-batch N --micro-batch N` shows what it means",
        )
    verdict = judge(facts, code, stop_after=_FOREVER, gpus=spec.gpus is not None)
    if isinstance(verdict, Stopped):
        return SmokeFailed(verdict.what, hint=verdict.hint.replace("--no-smoke", "`up --no-smoke`"))
    why = (
        verdict.why.replace(" (--smoke-limit)", "")
        if verdict is not None
        else "the script ended before its loop"
    )
    return EnvironmentFailure(f"Micro-batches cannot be tried: {why}.")


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
