"""Runs in words, as the command line and the pages tell them; and how their metrics are named."""

from __future__ import annotations

from spotguard.control.status.bottlenecks import mean_of, of_all, share_of_step
from spotguard.control.status.words import (
    DASH,
    DEMO,
    cluster,
    co2e,
    energy,
    fraction,
    last_save,
    machines,
    pace,
    percent,
    place,
    rate,
    saved_money,
    seconds,
    steps_done,
    steps_span,
    why,
)
from spotguard.events import metric

__all__ = [
    "cluster",
    "co2e",
    "DASH",
    "DEMO",
    "energy",
    "fraction",
    "last_save",
    "machines",
    "mean_of",
    "metric",
    "of_all",
    "pace",
    "percent",
    "place",
    "rate",
    "saved_money",
    "seconds",
    "share_of_step",
    "steps_done",
    "steps_span",
    "why",
]
