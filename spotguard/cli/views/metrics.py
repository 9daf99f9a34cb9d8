"""What a job logged and measured, in few words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.api.words import mean_of, metric, of_all, share_of_step
from spotguard.cli.views import formats
from spotguard.shared.units import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SHOWN = 6
_PARTS = (
    (metric.COMPUTE_S, "compute"),
    (metric.DATA_S, "data"),
    (metric.COMMUNICATION_S, "communication"),
    (metric.SAVE_S, "saving"),
)


def rows(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield (label, words) of the newest values; nothing where nothing is known."""
    logged = [(name, v) for name, v in metrics.items() if not name.startswith(metric.OWN)]
    if logged:
        words = [f"{name} {value:.4g}" for name, value in logged[-_SHOWN:]]
        more = len(logged) - len(words)
        yield "logged", " · ".join([*words, f"and {more} more"] if more else words)
    step = _step(metrics)
    if step:
        yield "a step", step
    use = _use(metrics)
    if use:
        yield "in use", use


def _step(metrics: Mapping[str, float]) -> str:
    step_s = metrics.get(metric.STEP_S)
    if step_s is None:
        return ""
    shares = ((label, share_of_step(metrics, name)) for name, label in _PARTS)
    parts = [f"{formats.percent(share)} {label}" for label, share in shares if share is not None]
    words = f"{format_duration(step_s)}: {', '.join(parts)}"
    samples = metrics.get(metric.SAMPLES_PER_S)
    return words if samples is None else f"{words} · {samples:.4g} samples/s"


def _use(metrics: Mapping[str, float]) -> str:
    parts = []
    gpus, busy = len(of_all(metrics, "utilization_pct")), mean_of(metrics, "utilization_pct")
    if busy is not None:
        parts.append(f"GPU {busy:.0f} %" if gpus == 1 else f"{gpus} GPUs {busy:.0f} %")
    memory, total = sum(of_all(metrics, "memory_bytes")), sum(of_all(metrics, "memory_total_bytes"))
    if total:
        parts.append(f"{format_bytes(memory)} of {format_bytes(total)}")
    power = of_all(metrics, "power_w")
    if power:
        parts.append(f"{sum(power):.0f} W")
    cpu = mean_of(metrics, "cpu_pct")
    if cpu is not None:
        parts.append(f"CPU {cpu:.0f} %")
    rss = of_all(metrics, "rss_bytes")
    if rss:
        parts.append(f"{format_bytes(max(rss))} of memory a node")
    return " · ".join(parts)
