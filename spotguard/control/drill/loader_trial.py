"""`doctor SCRIPT`: how fast the script's own loader reads, and what to change, in a smoke's way.

One process of the script on this machine's CPU, in a folder and a store of its own. It trains some
steps with its own batches, reads without training, writes down what it measured, and ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spotguard.control.drill.smoke.trial import WRITTEN_TO, check_possible, run_trial
from spotguard.errors import EnvironmentFailure
from spotguard.events import env
from spotguard.events.untrusted import (
    Refused,
    amount,
    an_object,
    integer,
    needed,
    objects,
    parse_object,
    text,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spotguard.spec.model import JobSpec

_SUBJECT = "The loader"
_WORTH_PCT = 5.0
"""Less than this is not worth a change."""


@dataclass(frozen=True, kw_only=True)
class TriedWorkers:
    """How fast the data were read with a number of workers, nothing else going on."""

    num_workers: int
    samples_per_s: float | None
    """None: too few samples came, or there is a problem."""
    first_s: float | None
    """Seconds until the first batch was there."""
    problem: str = ""
    """What the dataset says to workers, if it cannot have them."""


@dataclass(frozen=True, kw_only=True)
class LoaderAdvice:
    """What to change, and what that is expected to bring."""

    change: str
    gain: str


@dataclass(frozen=True, kw_only=True)
class LoaderReport:
    """What was measured of a script's loader, on this machine's CPU."""

    num_workers: int | None
    """None: its stream reads as it likes."""
    pin_memory: bool | None
    persistent_workers: bool | None
    prefetch_factor: int | None
    global_batch_size: int
    micro_batch_size: int
    steps: int
    """Trained for it."""
    step_s: float
    """Of each of them."""
    data_s: float
    """Of that, the loop's wait for data."""
    cores: int
    tried: tuple[TriedWorkers, ...]
    advice: tuple[LoaderAdvice, ...]

    @property
    def wait_pct(self) -> float:
        """Of a step, how much the loop waits for data."""
        return 100 * self.data_s / self.step_s if self.step_s else 0.0


def try_loader(spec: JobSpec, tell: Callable[[str], None]) -> LoaderReport:
    """Run the script until its loader is measured. Blocks for two minutes at most.

    Raises:
        SmokeFailed: the script does not work; names file and line.
        EnvironmentFailure: nothing can be measured here; says why.
    """
    check_possible(spec, _SUBJECT)
    tell("the script trains some steps on this machine's CPU; then its data are read alone ...")
    trial = run_trial(spec, env.TRY_LOADER, WRITTEN_TO)
    if trial.written is None:
        steps = trial.facts.steps
        early = f"the script ended after {steps} steps, before there was something to measure"
        raise trial.why_not(_SUBJECT, early)
    try:
        return report_of(trial.written, has_gpus=spec.gpus is not None)
    except Refused as problem:
        raise EnvironmentFailure(f"The loader's measures make no sense: {problem}.") from None


def report_of(raw: bytes, *, has_gpus: bool) -> LoaderReport:
    """Return what a job wrote down, with what to change.

    Args:
        raw: as the job wrote it.
        has_gpus: the nodes of the job have GPUs.

    Raises:
        Refused: it makes no sense.
    """
    body = parse_object(raw, "the measures")
    reading = an_object(body.get("reading", {}), "how it reads")
    plain = LoaderReport(
        num_workers=integer(reading, "num_workers", low=0),
        pin_memory=_flag(reading, "pin_memory"),
        persistent_workers=_flag(reading, "persistent_workers"),
        prefetch_factor=integer(reading, "prefetch_factor", low=1),
        global_batch_size=needed(integer(body, "global_batch_size", low=1), "batch"),
        micro_batch_size=needed(integer(body, "micro_batch_size", low=1), "micro-batch"),
        steps=needed(integer(body, "steps", low=1), "steps"),
        step_s=needed(amount(body, "step_s"), "time of a step"),
        data_s=needed(amount(body, "data_s"), "wait for data"),
        cores=integer(body, "cores", low=1) or 1,
        tried=tuple(
            TriedWorkers(
                num_workers=needed(integer(each, "num_workers", low=0), "workers"),
                samples_per_s=amount(each, "samples_per_s") or None,
                first_s=amount(each, "first_s"),
                problem=text(each, "problem") or "",
            )
            for each in objects(body, "tried")
        ),
        advice=(),
    )
    return replace(plain, advice=tuple(_advice(plain, has_gpus=has_gpus)))


def _flag(body: dict[str, Any], name: str) -> bool | None:
    value = body.get(name)
    return value if isinstance(value, bool) else None


def expected_step_s(report: LoaderReport, tried: TriedWorkers) -> float | None:
    """Return what a step would take with those workers, by how fast they read; None is unknown.

    Workers read beside the step's computation, of which the loop then waits for the rest only.
    """
    if tried.samples_per_s is None:
        return None
    computed_s = max(0.0, report.step_s - report.data_s)
    read_s = report.global_batch_size / tried.samples_per_s
    return max(computed_s, read_s) if tried.num_workers else computed_s + read_s


def _advice(report: LoaderReport, *, has_gpus: bool) -> Iterator[LoaderAdvice]:
    if not report.tried:
        yield LoaderAdvice(
            change="a stream reads as it likes: a torchdata StatefulDataLoader with num_workers "
            "reads it ahead",
            gain=f"at most the wait: {report.wait_pct:.0f} % of a step",
        )
        return
    yield from _more_workers(report)
    yield from _on_gpus(report, has_gpus=has_gpus)


def _more_workers(report: LoaderReport) -> Iterator[LoaderAdvice]:
    own = report.num_workers
    steps = {each.num_workers: expected_step_s(report, each) for each in report.tried}
    known = {count: step_s for count, step_s in steps.items() if step_s is not None}
    if own is None or report.wait_pct < _WORTH_PCT:
        return
    # Without workers nothing overlaps: what was measured is what there is.
    now_s = report.step_s if own == 0 else known.get(own, report.step_s)
    fastest = min(known.values(), default=now_s)
    # The fewest that are as good: each costs memory and a core.
    best = min((n for n, step_s in known.items() if step_s <= 1.02 * fastest), default=own)
    saved_pct = 100 * (1 - known.get(best, now_s) / now_s) if now_s else 0.0
    if best > own and saved_pct >= _WORTH_PCT:
        yield LoaderAdvice(
            change=f"num_workers={best} in run.loader, instead of {own}",
            gain=f"a step of {now_s:.3g} s becomes one of about {known[best]:.3g} s here "
            f"({saved_pct:.0f} % less)",
        )
    elif own and now_s <= 1.02 * max(0.0, report.step_s - report.data_s):
        yield LoaderAdvice(
            change=f"more cores, or fewer threads of torch beside {own} workers: alone they keep "
            "up, and beside the training they do not",
            gain=f"at most the wait: {report.wait_pct:.0f} % of a step",
        )
    else:
        yield LoaderAdvice(
            change="make samples cheaper: decode, tokenise and resize beforehand, in fewer and "
            "larger files; no other number of workers is faster on these cores",
            gain=f"at most the wait: {report.wait_pct:.0f} % of a step",
        )


def _on_gpus(report: LoaderReport, *, has_gpus: bool) -> Iterator[LoaderAdvice]:
    if not has_gpus:
        return
    rates = [each.samples_per_s for each in report.tried if each.samples_per_s]
    if rates and report.cores:
        least_s = report.global_batch_size / max(rates)
        yield LoaderAdvice(
            change=f"on GPUs: a step of {report.global_batch_size} samples on one rank that takes "
            f"less than {least_s:.3g} s waits for data, with {report.cores} cores as here",
            gain="compare it with `spotguard profile` once it trains",
        )
    if not report.pin_memory:
        yield LoaderAdvice(
            change="pin_memory=True in run.loader, and .to(run.device, non_blocking=True)",
            gain="copies to the GPU run beside the computation; no CPU can measure it",
        )
