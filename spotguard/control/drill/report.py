"""The verdict of a drill: what the disturbed run did not restore, found by comparing fingerprints.

Both runs wrote a line for each boundary and rank (`spotguard.runtime.checks.fingerprint`): hashes
of every tracked object, and of all else that can be reached. An attempt's first line tells what its
resume gave back, before anything was computed from it. What differs there from the undisturbed run,
differs still after the next step, and is no result of that step, was lost. All lines are compared
as long as the number of ranks is the same.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from spotguard.shared.json_documents import document

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from spotguard.events.states import EndReason

SCHEMA: Final = 1

_STATE = {
    "module": "a module",
    "optimizer": "an optimizer",
    "stateful": "an object with state_dict()",
    "random": "random generator",
    "random of data": "random generator",
    "position": "sampler position",
    "average": "EMA",
    "own tensor": "a module's own tensor",
    "own random": "random generator",
    "own position": "sampler position",
}
"""Kinds of state that a run needs, whatever the losses say, in words."""
_VALUES = {
    "tensor": "a tensor",
    "tensors": "a collection of tensors",
    "value": "a value",
    "own value": "a module's own value",
}
"""Kinds that may be for a log only: they are named where the losses or weights differ."""
_MADE_ANEW = ("average", "own tensor", *_VALUES)
"""Kinds of which a step may make another one: that is no state."""
_LABELS = {
    "LRScheduler": "scheduler",
    "LambdaLR": "scheduler",
    "AveragedModel": "EMA",
    "GradScaler": "gradient scaler",
}
_TRACKABLE = ("dict", "defaultdict", "OrderedDict")
_MOST_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that the disturbed run did not restore."""

    variable: str
    """Its name in the script, or what it is if it has none."""
    label: str
    """What sort of state it is, in words."""
    step: int
    """The step (from 1) after which the runs differ in it."""
    detail: str
    """One sentence with the way out."""
    rank: int | None = None
    """The first rank on which it differs; None if it does on all."""


@dataclass(frozen=True, kw_only=True)
class InterruptedAttempt:
    """What was done to one attempt of the disturbed run."""

    attempt: int
    nodes: int
    first_step: int | None
    """Steps already done when it started."""
    last_step: int | None
    """Steps done when it ended."""
    end_reason: EndReason | None
    steps_lost: int | None


@dataclass(frozen=True, kw_only=True)
class DrillReport:
    """What a drill showed."""

    schema: Literal[1] = field(default=SCHEMA, init=False)
    """Version of this document's form."""
    passed: bool
    """Whether all that the script needs was restored."""
    summary: str
    """The verdict in a sentence."""
    findings: list[Finding]
    notes: list[str]
    """What to know beside: counters that differ and need not matter, losses that are no number."""
    interruptions: list[InterruptedAttempt]
    steps: int
    """How many were trained."""
    parted_at: int | None
    """The first step (from 1) whose loss or tracked state differs; None if none does."""
    largest_loss_difference: float | None
    """Relative, over the steps on another number of ranks; 0.0 is bitwise, None: not measured."""

    def to_json(self) -> dict[str, Any]:
        """Return the object that `drill --json` prints."""
        return document(self)


@dataclass
class ProbedRun:
    """The lines of one run, by attempt, steps done and rank; and what its sample log says."""

    lines: dict[int, dict[int, dict[int, dict[str, Any]]]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    samples: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, probe: Path, trace: Path) -> ProbedRun:
        """Return what a run's probe and sample log say."""
        from spotguard.events.sample_log_reader import read_sample_trace

        run = cls()
        for text in probe.read_text().splitlines() if probe.exists() else []:
            run.add(json.loads(text))
        for traced in read_sample_trace(trace) if trace.exists() else []:
            run.losses[traced.step + 1] = traced.loss
            run.samples[traced.step + 1] = sorted(traced.samples)
        return run

    def add(self, line: dict[str, Any]) -> None:
        """Take in a line of the probe."""
        of_attempt = self.lines.setdefault(line["attempt"], {})
        of_attempt.setdefault(line["step"], {})[line["rank"]] = line

    @property
    def last(self) -> dict[int, dict[int, dict[str, Any]]]:
        """Return the lines of each boundary, of the last attempt that trained up to it.

        An attempt's first line is of a boundary that an earlier one has trained up to.
        """
        found: dict[int, dict[int, dict[str, Any]]] = {}
        for _, steps in sorted(self.lines.items()):
            first = min(steps)
            found.update({s: ranks for s, ranks in steps.items() if s > first or s not in found})
        return found


@dataclass(frozen=True)
class _Difference:
    """What differs between the lines of a boundary.

    By name, the first rank on which it does; None where it does on all.
    """

    step: int
    tracked: dict[str, int | None]
    others: dict[str, int | None]
    not_promised: dict[str, int | None]
    random: bool
    missing: set[str]
    """What the disturbed run does not have yet."""
    known: dict[str, dict[str, Any]]
    """What the undisturbed run says of the others."""

    @classmethod
    def between(
        cls, step: int, calm: dict[int, dict[str, Any]], disturbed: dict[int, dict[str, Any]]
    ) -> _Difference:
        """Compare the ranks' lines of one boundary."""
        ranks = sorted(calm.keys() & disturbed.keys())
        found: dict[str, dict[str, list[int]]] = {
            key: {} for key in ("tracked", "others", "not_promised")
        }
        missing: set[str] = set()
        for rank in ranks:
            for key, differing in found.items():
                one, other = calm[rank][key], disturbed[rank][key]
                for name in [n for n in one if n in other and _hash(one[n]) != _hash(other[n])]:
                    differing.setdefault(name, []).append(rank)
            missing |= calm[rank]["others"].keys() - disturbed[rank]["others"].keys()
        named: dict[str, Any] = {
            key: {n: None if on == ranks else on[0] for n, on in differing.items()}
            for key, differing in found.items()
        }
        return cls(
            **named,
            step=step,
            random=any(calm[r]["random"] != disturbed[r]["random"] for r in ranks),
            missing=missing,
            known={n: o for r in reversed(ranks) for n, o in calm[r]["others"].items()},
        )


def _hash(value: Any) -> Any:
    return value["hash"] if isinstance(value, dict) else value


def compare(
    calm: ProbedRun, disturbed: ProbedRun
) -> tuple[list[Finding], list[str], int | None, float | None]:
    """Return findings, notes, the step where the runs part, and the largest loss difference.

    The loss difference is relative and taken over steps on another number of ranks.
    """
    return _Comparison(calm, disturbed).result()


class _Comparison:
    def __init__(self, calm: ProbedRun, disturbed: ProbedRun) -> None:
        self._calm, self._disturbed = calm, disturbed
        self._of_calm = calm.last
        self._carried = {
            name
            for run in (calm, disturbed)
            for steps in run.lines.values()
            for ranks in steps.values()
            for line in ranks.values()
            for name, other in line["others"].items()
            if other["carried"]
        }
        self._attempts = list(self._on_as_many_ranks())
        undisturbed = self._attempts[0] if self._attempts else []
        self._noisy = {name for d in undisturbed for name in (*d.others, *d.not_promised)}
        self._parted, self._parted_undisturbed = self._first_parted()

    def result(self) -> tuple[list[Finding], list[str], int | None, float | None]:
        parted = self._parted
        if parted is not None and self._parted_undisturbed:
            return [_not_reproducible(parted)], [], parted, None
        findings, notes = self._lost()
        notes += _no_numbers(self._calm, self._disturbed)
        findings = findings or self._random_states()
        if parted is not None and not findings:
            findings = [_unknown_cause(parted)]
        findings += _wrong_samples(self._calm, self._disturbed)
        if parted is not None:  # later losses differ by what was not restored
            return findings, notes, parted, None
        drift, elastic = _elastic_drift(self._calm, self._disturbed)
        return findings + elastic, notes, parted, drift

    def _on_as_many_ranks(self) -> Iterator[list[_Difference]]:
        """Yield what differs in each attempt, up to the first on another number of ranks.

        From there on the order of summation differs, too; see `_elastic_drift`.
        """
        for _, steps in sorted(self._disturbed.lines.items()):
            common = sorted(steps.keys() & self._of_calm.keys())
            if any(_world_size(self._of_calm[s]) != _world_size(steps[s]) for s in common):
                return
            yield [_Difference.between(s, self._of_calm[s], steps[s]) for s in common]

    def _first_parted(self) -> tuple[int | None, bool]:
        """Return the first step after which a loss or tracked state differs.

        And whether that was in the first attempt, which nothing had interrupted.
        """
        for step, ranks in sorted(self._disturbed.last.items()):
            calm = self._of_calm.get(step)
            if calm is None:
                continue
            if _world_size(calm) != _world_size(ranks):
                break
            losses = self._calm.losses.get(step), self._disturbed.losses.get(step)
            if _Difference.between(step, calm, ranks).tracked or not _is_same(*losses):
                return step, next(iter(ranks.values()))["attempt"] == 1
        return None, False

    # ------------------------------------------------------------------ what was lost

    def _lost(self) -> tuple[list[Finding], list[str]]:
        """Return what the resumes did not give back, and notes on what may not matter."""
        findings: dict[str, Finding] = {}
        values: dict[str, Finding] = {}
        not_promised: dict[str, None] = {}
        for differences in self._attempts[1:]:
            if len(differences) < 2:
                continue
            first, *later = differences
            if self._parted is not None and self._parted <= first.step:
                break  # what differs follows from what was found before
            self._look_at(first, later, findings, values)
            not_promised.update(dict.fromkeys(n for d in later for n in d.not_promised))
        if self._parted is not None and not findings:
            findings = dict(list(values.items())[:_MOST_NAMED])
        named = set(findings)
        notes = [_note(value) for name, value in values.items() if name not in named]
        if len(notes) > _MOST_NAMED:
            notes[_MOST_NAMED:] = [f"{len(notes) - _MOST_NAMED} more values differ after a resume"]
        notes += [
            f"{name} differs after a resume, which does not promise to keep it"
            for name in not_promised
            if name not in self._noisy
        ]
        parts = {n for n in findings for other in findings if _is_part(n, other)}
        return [f for name, f in findings.items() if name not in parts], notes

    def _look_at(
        self,
        first: _Difference,
        later: list[_Difference],
        findings: dict[str, Finding],
        values: dict[str, Finding],
    ) -> None:
        after, absent = later[0], first.missing
        for name, rank in first.tracked.items():
            if name in after.tracked:
                findings.setdefault(name, _not_given_back(name, after.step, rank))
        for difference in later:
            # What is made later may be made of what the runs have computed apart by then.
            made = absent - difference.missing if self._is_before_parting(difference) else set()
            lost = first.others.keys() | made if difference is after else made
            absent &= difference.missing
            for name in [n for n in difference.others if n in lost and n not in self._noisy]:
                other = difference.known[name]
                if other["kind"] not in _MADE_ANEW or name in self._carried:
                    into = findings if other["kind"] in _STATE else values
                    into.setdefault(name, _finding(name, other, difference))

    def _is_before_parting(self, difference: _Difference) -> bool:
        return self._parted is None or difference.step <= self._parted

    def _random_states(self) -> list[Finding]:
        """Return that the global generators differ, if they do once a step was trained."""
        differing = (d.step for each in self._attempts[1:] for d in each[1:] if d.random)
        return [_global_generators(step) for step in itertools.islice(differing, 1)]


def _is_part(name: str, whole: str) -> bool:
    """Return whether a name is that of a part of another, or a function's for the same variable."""
    return name.startswith((f"{whole}.", f"{whole}[")) or name.endswith(f".<{whole}>")


def _world_size(ranks: dict[int, dict[str, Any]]) -> Any:
    return next(iter(ranks.values()))["world_size"]


def _no_numbers(calm: ProbedRun, disturbed: ProbedRun) -> list[str]:
    """Return that losses are not a number, in both runs: there is little that could differ."""
    for step, loss in sorted(calm.losses.items()):
        if math.isnan(loss) and math.isnan(disturbed.losses.get(step, 0.0)):
            return [f"the loss of step {step} is not a number, in both runs"]
    return []


def _is_same(one: float | None, other: float | None) -> bool:
    """Tell whether two losses are equal; two that are not a number are."""
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))


# ---------------------------------------------------------------------- what is said


def _finding(name: str, other: dict[str, Any], difference: _Difference) -> Finding:
    rank = difference.others[name]
    return Finding(
        variable=name,
        label=_label(name, other),
        step=difference.step,
        detail=_on(rank) + _way_out(name, other),
        rank=rank,
    )


def _on(rank: int | None) -> str:
    return "" if rank is None else f"on rank {rank}, "


def _label(name: str, other: dict[str, Any]) -> str:
    type_, kind = other["type"], other["kind"]
    if type_ in _LABELS:
        return _LABELS[type_]
    if type_.endswith(("LR", "Scheduler")) or "sched" in name.lower():
        return "scheduler"
    if "ema" in name.lower().split("_") or "ema" in type_.lower():
        return "EMA"
    return {**_STATE, **_VALUES}[kind]


def _way_out(name: str, other: dict[str, Any]) -> str:
    """Return what happens to it after a resume, and what to do."""
    kind = other["kind"].removeprefix("own ")
    holder, _, word = name.rpartition(".")
    word = word.partition("[")[0]
    again = f"{name} starts again after a resume"
    if kind == "position":
        return f"{name} starts again from its beginning; read the data through run.loader(...)"
    if kind == "random of data":
        return f"{again}; leave init(reseed=True), which seeds it for each micro-batch"
    if kind == "value" and holder and "<" not in word:
        keep = f'run.track_values({holder}, "{word}")'
        return f"{again}; set it anew from step.number, or keep it: {keep}"
    if kind == "value":
        return (
            f"{again}; set it anew from step.number, or keep it in a tracked dict: run.track(...)"
        )
    if other["kind"] == "own tensor":
        return f"{again}; make it a part of state_dict(), such as a buffer with persistent=True"
    if kind in ("tensors", "tensor", "average") and other["type"] not in _TRACKABLE:
        return f"{again}; keep it in a dict, and track that: run.track(...)"
    return f"{again}; add it: run.track({word}={name})"


def _note(value: Finding) -> str:
    where = "" if value.rank is None else f" on rank {value.rank}"
    return f"{value.variable} starts again after a resume{where}; no loss and no weight showed it"


def _not_given_back(name: str, step: int, rank: int | None) -> Finding:
    where = "" if rank is None else f" on rank {rank}"
    if rank:
        cause = "a resume gives all ranks the one of rank 0; keep what each rank has of its own "
        cause += "in no tracked object, or let all ranks hold the same"
    else:
        cause = "its load_state_dict() must take back all that its state_dict() returns"
    return Finding(
        variable=name,
        label="tracked state",
        step=step,
        detail=f"{name} is tracked, and another one{where} after a resume: {cause}",
        rank=rank,
    )


def _global_generators(step: int) -> Finding:
    return Finding(
        variable="the global random generators",
        label="dropout random state",
        step=step,
        detail="they are not what they were; leave init(reseed=True), or do not seed by time",
    )


def _not_reproducible(step: int) -> Finding:
    return Finding(
        variable="the script",
        label="not reproducible",
        step=step,
        detail="two runs differ before anything interrupted them: it draws random numbers before "
        "spotguard.init(), which seeds them, or has unseeded ones of its own; move init() up, or "
        "seed them",
    )


def _unknown_cause(step: int) -> Finding:
    return Finding(
        variable="something outside the loop's variables",
        label="unknown state",
        step=step,
        detail="losses or weights differ from here on, but no variable of the script explains it",
    )


def _wrong_samples(calm: ProbedRun, disturbed: ProbedRun) -> list[Finding]:
    for step, samples in sorted(calm.samples.items()):
        if step in disturbed.samples and disturbed.samples[step] != samples:
            return [
                Finding(
                    variable="the loader",
                    label="sampler position",
                    step=step,
                    detail="other samples were read than in the undisturbed run",
                )
            ]
    return []


_LOSS_TOLERANCE = 1e-3
"""Relative; summation order alone gives about 1e-6 a step, amplified by training."""


_NOT_OF_THE_WHOLE = "is a loss or a statistic computed over the whole global batch?"
_LAST_BITS = (
    "L-BFGS makes its directions and line searches of differences of losses and gradients, and so "
    "much of their last bits, which another number of ranks adds up in another order; "
    'init(exact="bitwise") adds them up in one order'
)
_POWER_ITERATIONS = (
    "its spectral_norm goes on by a power iteration in each forward pass, and another number of "
    "ranks has another number of them; a larger n_power_iterations makes that matter less"
)


def _elastic_drift(calm: ProbedRun, disturbed: ProbedRun) -> tuple[float | None, list[Finding]]:
    """Compare the losses of the steps done on another number of ranks."""
    lines = calm.last
    drifts = {
        step: _drift(calm.losses[step], disturbed.losses[step])
        for step, ranks in disturbed.last.items()
        if step in lines
        and _world_size(ranks) != _world_size(lines[step])
        and step in calm.losses
        and step in disturbed.losses
    }
    if not drifts:
        return None, []
    worst = max(drifts.values())
    if worst <= _LOSS_TOLERANCE:
        return worst, []
    step = min(step for step, drift in drifts.items() if drift > _LOSS_TOLERANCE)
    variable, cause = _cause_of_drift(disturbed.last[step][0])
    differs = f"the loss differs by {worst:.1e}"
    if not math.isfinite(worst):
        differs = "the loss of one run is not a number or infinite, and that of the other is not"
    return worst, [
        Finding(
            variable=variable,
            label="elastic step",
            step=step,
            detail=f"on another number of ranks {differs}; {cause}",
        )
    ]


def _drift(calm: float, disturbed: float) -> float:
    """Return by how much a loss differs, relatively; infinitely if one of both is no number."""
    if _is_same(calm, disturbed):
        return 0.0
    drift = abs(disturbed - calm) / max(abs(calm), 1e-12)
    return drift if math.isfinite(drift) else math.inf


def _cause_of_drift(line: dict[str, Any]) -> tuple[str, str]:
    """Return what makes losses differ on another number of ranks, and why, as far as it is seen."""
    for kind, cause in (("amplifiers", _LAST_BITS), ("iterating", _POWER_ITERATIONS)):
        if line[kind]:
            return line[kind][0], cause
    return "the loss", _NOT_OF_THE_WHOLE
