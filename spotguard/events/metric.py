"""Metrics as they stand in the run store: one line for each name and upload, values side by side.

    {"name": "loss", "step": [0, 1], "done": [0, 1], "at": [...], "value": [2.3, "nan"]}

`step` is the step that a value belongs to, `done` how many steps were finished when it was logged:
by that it is known what a later attempt, which resumed from a checkpoint, does again.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spotguard.events.untrusted import LARGEST, Refused, needed, number, parse_object, seconds, text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OWN = "spotguard/"
"""How the names of what the runtime itself measures begin; a script's may not."""
STEP_S = f"{OWN}step_s"
"""Seconds of a step, from the end of the one before to its own: the mean of some steps."""
DATA_S = f"{OWN}data_s"
"""Of these, spent waiting for the data loader."""
SAVE_S = f"{OWN}save_s"
"""Of these, in which a save held up the loop."""
COMMUNICATION_S = f"{OWN}communication_s"
"""Of these, spent waiting for gradients of other ranks, where this process itself does that."""
COMPUTE_S = f"{OWN}compute_s"
"""The rest: forward, backward, optimizer, and what else the script does."""
SAMPLES_PER_S = f"{OWN}samples_per_s"
"""Samples of the whole run, over all ranks."""
MOST_SHOWN = 256
"""Newest values that are taken of a heartbeat."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./ -]{0,127}")
_OF_NODE = re.compile(rf"{OWN}node(\d{{1,6}})/(?:gpu(\d{{1,4}})/)?([a-z_]+)")
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MOST_VALUES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class MetricLine:
    """Values of one name, in the order in which they were logged; all sequences are as long."""

    name: str
    steps: Sequence[int]
    done: Sequence[int]
    """Steps finished when each was logged."""
    at: Sequence[float]
    """Seconds since the epoch."""
    values: Sequence[float]

    def to_body(self) -> dict[str, Any]:
        """Return the JSON object of the line."""
        return {
            "name": self.name,
            "step": list(self.steps),
            "done": list(self.done),
            "at": [round(at, 3) for at in self.at],
            "value": [v if math.isfinite(v) else str(float(v)) for v in self.values],
        }

    @classmethod
    def from_json(cls, raw: bytes) -> MetricLine:
        """Return the line that `to_body` became; `Refused` if it is none."""
        body = parse_object(raw, "the line", most_bytes=64 << 20)
        name = needed(text(body, "name"), "name")
        if not NAME.fullmatch(name):
            raise Refused("its name is none of a metric")
        columns = [body.get(column) for column in ("step", "done", "at", "value")]
        steps, done, at, values = (
            column if isinstance(column, list) else None for column in columns
        )
        if steps is None or done is None or at is None or values is None:
            raise Refused("a column is missing")
        if not len(steps) == len(done) == len(at) == len(values) <= _MOST_VALUES:
            raise Refused("its columns are not of one length")
        return cls(
            name=name,
            steps=[_count(step) for step in steps],
            done=[_count(step) for step in done],
            at=[needed(seconds({"at": each}, "at"), "instant") for each in at],
            values=[_value(value) for value in values],
        )


def node_metric(node: int, what: str, *, gpu: int | None = None) -> str:
    """Return the name of what a node, or one of its GPUs, uses: `spotguard/node0/gpu1/power_w`.

    `cpu_pct` and `rss_bytes` (its first rank with all child processes) are a node's;
    `utilization_pct`, `memory_bytes`, `memory_total_bytes`, `power_w` and `energy_j` (since its
    driver was loaded) a GPU's.
    """
    return f"{OWN}node{node}/{what}" if gpu is None else f"{OWN}node{node}/gpu{gpu}/{what}"


def of_node(name: str) -> tuple[int, int | None, str] | None:
    """Return (node, GPU or None, what) of such a name; None if it is none."""
    match = _OF_NODE.fullmatch(name)
    if match is None:
        return None
    return int(match[1]), int(match[2]) if match[2] else None, match[3]


def newest_values(body: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers by name in `metrics` of a heartbeat, as far as any are."""
    values = body.get("metrics")
    if not isinstance(values, dict):
        return {}
    found = ((name, number(values, name)) for name in list(values)[:MOST_SHOWN])
    return {name: value for name, value in found if value is not None and NAME.fullmatch(name)}


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise Refused("a step is no count")
    return value


def _value(value: object) -> float:
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Refused("a value is no number")
    return float(value)
