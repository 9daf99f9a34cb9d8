"""The verdict of a drill: what the disturbed run did not restore, found by comparing fingerprints.

Both runs wrote a line per step (`spotguard.runtime.checks.fingerprint`): a hash of every tracked
object, of the global random generators, and of every variable that the training loop can see. All
of them must agree step by step while the number of ranks is the same. Where they part first, right
after a resume, whatever is neither tracked nor computed anew in each step was not restored.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from spotguard.shared.json_documents import document

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.events.states import EndReason

SCHEMA: Final = 1

_PERSISTENT = {
    "module": "a module",
    "optimizer": "an optimizer",
    "stateful": "an object with state_dict()",
    "random": "a random generator",
    "sampler": "the sampler position",
    "tensors": "a collection of tensors",
}
"""Kinds of variables that keep state from step to step, in words."""

_LABELS = {
    "LRScheduler": "scheduler",
    "LambdaLR": "scheduler",
    "AveragedModel": "EMA",
    "GradScaler": "gradient scaler",
}


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
    """The lines of one run: per step, of the last attempt that did it."""

    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    samples: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def read(cls, probe: Path, trace: Path) -> ProbedRun:
        """Return what a run's probe and sample log say."""
        from spotguard.events.sample_log_reader import read_sample_trace

        run = cls()
        for text in probe.read_text().splitlines() if probe.exists() else []:
            line = json.loads(text)
            known = run.steps.get(line["step"])
            if known is None or line["attempt"] >= known["attempt"]:
                run.steps[line["step"]] = line
        for traced in read_sample_trace(trace) if trace.exists() else []:
            run.losses[traced.step + 1] = traced.loss
            run.samples[traced.step + 1] = sorted(traced.samples)
        return run


@dataclass(frozen=True)
class _Difference:
    step: int
    attempt: int
    tracked: list[str]
    random: bool
    variables: dict[str, dict[str, str]]
    loss: bool


def compare(
    calm: ProbedRun, disturbed: ProbedRun
) -> tuple[list[Finding], list[str], int | None, float | None]:
    """Return findings, notes, the step where the runs part, and the largest loss difference.

    The loss difference is relative and taken over steps on another number of ranks.
    """
    differences = _differences(calm, disturbed)
    before = [d for d in differences if d.attempt == 1]
    noisy = {name for d in before for name in d.variables}
    parted = next((d.step for d in differences if d.tracked or d.loss), None)
    if parted is not None and any(d.step == parted for d in before):
        return [_not_reproducible(parted)], [], parted, None
    after = [d for d in differences if d.attempt > 1]
    findings, notes = _not_restored(after, noisy, parted)
    notes += _no_numbers(calm, disturbed)
    if parted is not None and not findings:
        findings += _plain_causes(after, noisy, parted) or [_unknown_cause(parted)]
    findings += _wrong_samples(calm, disturbed)
    if parted is not None:  # later losses differ by what was not restored
        return findings, notes, parted, None
    drift, elastic = _elastic_drift(calm, disturbed)
    return findings + elastic, notes, parted, drift


def _differences(calm: ProbedRun, disturbed: ProbedRun) -> list[_Difference]:
    """Compare every step that both did on the same number of ranks (and after no other one)."""
    found = []
    for step in sorted(disturbed.steps):
        one, other = calm.steps.get(step), disturbed.steps[step]
        if one is None:
            continue
        if one["world_size"] != other["world_size"]:
            break  # from here on only the order of summation differs; see _elastic_drift
        difference = _Difference(
            step=step,
            attempt=other["attempt"],
            tracked=[n for n, h in other["tracked"].items() if one["tracked"].get(n) != h],
            random=one["random"] != other["random"],
            variables={
                name: variable
                for name, variable in other["variables"].items()
                if name in one["variables"] and one["variables"][name]["hash"] != variable["hash"]
            },
            loss=not _is_same(calm.losses.get(step), disturbed.losses.get(step)),
        )
        if difference.tracked or difference.random or difference.variables or difference.loss:
            found.append(difference)
    return found


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


def _not_restored(
    differences: list[_Difference], noisy: set[str], parted: int | None
) -> tuple[list[Finding], list[str]]:
    findings: dict[str, Finding] = {}
    notes: dict[str, str] = {}
    for difference in differences:
        for name, variable in difference.variables.items():
            if name in noisy or name in findings:
                continue
            kind = variable["kind"]
            if kind in _PERSISTENT and not _is_consequence(difference, parted, findings):
                findings[name] = _finding(name, variable, difference.step)
            elif kind == "value":
                notes.setdefault(name, f"{name} differs after step {difference.step}")
    if not findings:
        findings.update(_weaker_causes(differences, noisy, parted))
    return list(findings.values()), [] if findings and not notes else list(notes.values())


def _is_consequence(
    difference: _Difference, parted: int | None, findings: dict[str, Finding]
) -> bool:
    """Once the runs have parted for a known reason, everything differs: that says nothing."""
    return parted is not None and difference.step > parted and bool(findings)


def _weaker_causes(
    differences: list[_Difference], noisy: set[str], parted: int | None
) -> dict[str, Finding]:
    """Name the global generators, or a tensor that is carried from step to step."""
    for difference in differences:
        if parted is not None and difference.step > parted:
            break
        if difference.random:
            variable = {"kind": "random", "type": "global generators"}
            return {
                "dropout random state": Finding(
                    variable="the global random generators",
                    label="dropout random state",
                    step=difference.step,
                    detail=_way_out("the global random generators", variable),
                )
            }
        if difference.tracked or difference.loss:
            continue  # a tensor that differs may follow from these
        for name, variable in difference.variables.items():
            if variable["kind"] == "tensor" and name not in noisy:
                return {name: _finding(name, variable, difference.step)}
    return {}


def _plain_causes(differences: list[_Difference], noisy: set[str], parted: int) -> list[Finding]:
    """Name the plain values that no state has: a module's own, or one that parted before the rest.

    A value that differs from the same step on may follow from the losses.
    """
    found: dict[str, Finding] = {}
    for difference in differences:
        for name, variable in difference.variables.items():
            own = variable["kind"] == "attribute" and difference.step <= parted
            earlier = variable["kind"] == "value" and difference.step < parted
            if (own or earlier) and name not in noisy:
                found.setdefault(name, _plain_finding(name, difference.step, own=own))
    return list(found.values())


def _plain_finding(name: str, step: int, *, own: bool) -> Finding:
    way_out = "set it anew from step.number, or keep it in a tensor: register_buffer"
    if not own:
        way_out = "set it anew from step.number, or keep it in a tracked dict: run.track(...)"
    return Finding(
        variable=name,
        label="a module's own value" if own else "a value",
        step=step,
        detail=f"{name} starts again after a resume; {way_out}",
    )


def _finding(name: str, variable: dict[str, str], step: int) -> Finding:
    return Finding(
        variable=name,
        label=_label(name, variable),
        step=step,
        detail=_way_out(name, variable),
    )


def _label(name: str, variable: dict[str, str]) -> str:
    type_ = variable["type"]
    if type_ in _LABELS:
        return _LABELS[type_]
    if type_.endswith(("LR", "Scheduler")) or "sched" in name.lower():
        return "scheduler"
    if "mirrors" in variable or "ema" in name.lower().split("_") or "ema" in type_.lower():
        return "EMA"
    if variable["kind"] == "random":
        return "random generator"
    if variable["kind"] == "sampler":
        return "sampler position"
    return _PERSISTENT.get(variable["kind"], "a tensor")


def _way_out(name: str, variable: dict[str, str]) -> str:
    if variable["kind"] == "sampler":
        return f"{name} starts again from its beginning; read the data through run.loader(...)"
    if name.startswith("the global"):
        return "they are not what they were; leave init(reseed=True), or do not seed by time"
    if variable["kind"] == "random" and variable["type"].endswith(("Dataset", "ElasticLoader")):
        return f"the generator inside {name} starts again; use Python's, NumPy's or torch's own"
    if variable["kind"] in ("tensors", "tensor") and variable["type"] != "dict":
        return f"{name} starts again; keep it in a dict, and track that: run.track(...)"
    word = name.rpartition(".")[2]
    return f"{name} starts again after a resume; add it: run.track({word}={name})"


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
    drifts = {
        step: _drift(calm.losses[step], disturbed.losses[step])
        for step, line in disturbed.steps.items()
        if step in calm.steps
        and line["world_size"] != calm.steps[step]["world_size"]
        and step in calm.losses
        and step in disturbed.losses
    }
    if not drifts:
        return None, []
    worst = max(drifts.values())
    if worst <= _LOSS_TOLERANCE:
        return worst, []
    step = min(step for step, drift in drifts.items() if drift > _LOSS_TOLERANCE)
    variable, cause = _cause_of_drift(disturbed.steps[step])
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
