"""All runs as Prometheus reads them: on the dashboard at `/metrics`, or in a file of text.

What is unknown has no sample: a price that nobody knows is not zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.errors import MissingExtra
from spotguard.events.states import EndReason, RunState

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from prometheus_client.metrics_core import Metric

    from spotguard.control.report.measures import RunMeasures

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREEMPTIONS = tuple(reason.value for reason in EndReason if reason.retried)


def exposition(runs: Sequence[RunMeasures]) -> bytes:
    """Return the text that Prometheus reads.

    Raises:
        MissingExtra: prometheus-client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.registry import Collector
    except ImportError as problem:
        raise MissingExtra(
            "metrics need the package prometheus-client",
            hint="pip install 'spotguard[dashboard]'",
        ) from problem

    class Runs(Collector):
        """What is known now."""

        def collect(self) -> Iterable[Metric]:
            """Return all families."""
            return _families(runs)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Runs())
    return bytes(generate_latest(registry))


def _families(runs: Sequence[RunMeasures]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def gauge(name: str, words: str, *more: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"spotguard_{name}", words, labels=("run", *more))

    def counter(name: str, words: str, *more: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"spotguard_{name}", words, labels=("run", *more))

    def add(family: Metric, run: RunMeasures, value: float | None, *more: str) -> None:
        if value is not None:
            family.add_metric((run.summary.run_id, *more), value)  # type: ignore[attr-defined]

    info = gauge("run_info", "1; says the name, and whether its money is played.", "name", "prices")
    state = gauge("run_state", "1 for the state in which the run is, else 0.", "state")
    queued = gauge("run_queued", "1 while it waits for money that others hold, else 0.")
    steps = gauge("steps_done", "Steps done that count.")
    total = gauge("steps_total_planned", "Steps that the run is to do.")
    spent = counter("spent_usd", "What the run has cost, over all attempts.")
    budget = gauge("budget_usd", "The most that it may cost.")
    rate = gauge("rate_usd_per_h", "What it costs in an hour now.")
    nodes = gauge("nodes", "Nodes that it has now.")
    attempts = counter("attempts", "Attempts so far.")
    preempted = counter("preemptions", "Attempts that were taken, by the reason.", "reason")
    phases = counter("phase_seconds", "Wall time by what it was spent on.", "phase")
    money = counter("phase_usd", "Money by what it was spent on.", "phase")
    saves = counter("saves", "Saves that were committed.")
    save_s = counter("save_seconds", "Seconds that all saves took together.")
    save_bytes = counter("save_bytes", "Bytes of all saves together.")
    last_s = gauge("last_save_seconds", "Seconds that the newest save took.")
    last_bytes = gauge("last_save_bytes", "Bytes of the newest save.")
    last_at = gauge("last_save_timestamp_seconds", "When the newest save that counts was made.")
    hazard = gauge("hazard_per_h", "Interruptions to be expected in an hour, at its nodes' age.")
    energy = counter("energy_kwh", "Energy drawn at the data centre's wall.", "how")
    carbon = counter("co2e_kg", "CO2e caused.", "how")
    for run in runs:
        told = run.summary
        add(info, run, 1.0, told.name, "demo" if told.demo_prices else "paid")
        for each in RunState:
            add(state, run, float(each is told.state), each.value)
        add(queued, run, float(bool(told.queued)))
        add(steps, run, told.step)
        add(total, run, told.total_steps)
        add(spent, run, told.spent_usd)
        add(budget, run, told.budget_usd)
        add(rate, run, told.rate_usd_per_h)
        add(nodes, run, run.nodes)
        add(attempts, run, told.attempts)
        for reason in _PREEMPTIONS:
            add(preempted, run, run.ends.get(reason, 0), reason)
        for share in run.time:
            add(phases, run, share.seconds, share.use.value)
            add(money, run, share.usd, share.use.value)
        add(saves, run, run.saves)
        add(save_s, run, run.save_s)
        add(save_bytes, run, run.save_bytes)
        add(last_s, run, run.last_save_s)
        add(last_bytes, run, run.last_save_bytes)
        add(last_at, run, run.last_saved_at)
        add(hazard, run, run.hazard_per_h)
        how = "measured" if run.carbon.measured else "estimated"
        add(energy, run, run.carbon.energy_kwh, how)
        add(carbon, run, run.carbon.co2e_kg, how)
    yield from (info, state, queued, steps, total, spent, budget, rate, nodes, attempts, preempted)
    yield from (phases, money, saves, save_s, save_bytes, last_s, last_bytes, last_at, hazard)
    yield from (energy, carbon)
