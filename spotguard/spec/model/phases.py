"""Phases, and moving a job: what of it says where it runs, and what becomes of the rest. Pure.

A price is of one machine and an instance type of one cloud, so neither goes along to another place
unless it is given again.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from spotguard.events.states import Market  # noqa: TC001 - pydantic reads the annotation
from spotguard.shared.typo_guess import did_you_mean
from spotguard.spec.complaint import SaysItAll
from spotguard.spec.infra import CLOUDS, PLACES, gpu_count, kind_of
from spotguard.spec.model.tables import Frozen
from spotguard.spec.nodes import NodeRange  # noqa: TC001 - pydantic reads the annotation
from spotguard.spec.setting import Whole

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from spotguard.spec.model.job import JobSpec
    from spotguard.spec.setting import Setting

UNTIL = "until_step"
PLACE_FIELDS = (
    "infra",
    "on_demand_infra",
    "gpus",
    "nodes",
    "nproc_per_node",
    "market",
    "on_demand",
    "max_price_usd_per_h",
    "price_usd_per_h",
    "on_demand_usd_per_h",
    "template",
)
"""The fields of a `JobSpec` that say where it runs, on what, and how that is bought."""
_LONGEST = 80


class PhaseSpec(Frozen):
    """One phase of a run. What it does not say is as the job has it."""

    until_step: int | None = None
    """The phase ends once so many steps are done; None, of the last one: with the run."""
    infra: str | None = None
    on_demand_infra: str | None = None
    gpus: str | None = None
    nodes: NodeRange | None = None
    nproc_per_node: int | None = None
    market: Market | None = None
    on_demand: str | None = None
    max_price_usd_per_h: float | None = None
    price_usd_per_h: float | None = None
    on_demand_usd_per_h: float | None = None
    template: str | None = None

    @property
    def place(self) -> dict[str, Any]:
        """Return what it says of where it runs, by the fields of a `JobSpec`."""
        said = {name: getattr(self, name) for name in PLACE_FIELDS}
        return {name: value for name, value in said.items() if value is not None}


def parse_phases(
    raw: object, setting_of: Callable[[str], Setting | None]
) -> tuple[dict[str, object], ...]:
    """Return phases as `PhaseSpec` takes them, from a list of tables, or that as a TOML text.

    Args:
        raw: what a file, a variable or a journal has.
        setting_of: the setting of a field of `JobSpec`, by which each value is read.

    Raises:
        SaysItAll: the list cannot be followed; one sentence, which names the phase and its key.
    """
    if isinstance(raw, str):
        raw = _from_toml(raw)
    if not isinstance(raw, (list, tuple)):
        raise SaysItAll(f"given {_short(raw)}; allowed: a list of tables")
    names = {(found.key if found else "") or n: n for n in PLACE_FIELDS if (found := setting_of(n))}
    phases = tuple(
        _phase(each, number, names, setting_of) for number, each in enumerate(raw, start=1)
    )
    _check_order([phase[UNTIL] for phase in phases])
    return phases


def _from_toml(text: str) -> object:
    try:
        return tomllib.loads(f"phases = {text}")["phases"]
    except (ValueError, RecursionError) as problem:
        raise SaysItAll(f"given {_short(text)}; allowed: a list of tables, as in TOML") from problem


def _phase(
    raw: object,
    number: int,
    names: Mapping[str, str],
    setting_of: Callable[[str], Setting | None],
) -> dict[str, Any]:
    if isinstance(raw, PhaseSpec):
        raw = raw.model_dump()
    if not isinstance(raw, dict):
        raise SaysItAll(f"phase {number} is {_short(raw)}; allowed: a table")
    phase: dict[str, Any] = {UNTIL: None}
    for key, value in raw.items():
        name = names.get(key, key)
        if name not in (UNTIL, *PLACE_FIELDS):
            hint = did_you_mean(key, (UNTIL, *names))
            words = f"phase {number} has {key!r}, which no phase can change"
            raise SaysItAll(words, hint=hint or f"it can have {', '.join((UNTIL, *names))}")
        if value is not None:
            phase[name] = _value(number, key, name, value, setting_of)
    return phase


def _value(
    number: int,
    key: str,
    name: str,
    value: object,
    setting_of: Callable[[str], Setting | None],
) -> object:
    setting = None if name == UNTIL else setting_of(name)
    parse, allowed = (Whole(1), "a whole number from 1")
    if setting is not None:
        parse, allowed = setting.parse, setting.allowed  # type: ignore[assignment]
    try:
        return parse(value)
    except ValueError:
        words = f"phase {number} has {key} = {_short(value)}; allowed: {allowed}"
        raise SaysItAll(words) from None


def _check_order(ends: Sequence[int | None]) -> None:
    before = 0
    for number, end in enumerate(ends, start=1):
        is_last = number == len(ends)
        if is_last and end is not None:
            raise SaysItAll(
                f"phase {number} has {UNTIL} = {end}, but the last one goes on to the run's end",
                hint=f"take {UNTIL} out of it, or add a phase for what follows",
            )
        if not is_last and end is None:
            raise SaysItAll(f"phase {number} has no {UNTIL}, and only the last one goes without")
        if end is not None and end <= before:
            raise SaysItAll(
                f"phase {number} has {UNTIL} = {end}, but phase {number - 1} ends at {before}: "
                "each has to end after the one before"
            )
        before = end or before


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 3]}..."


def moved_values(spec: JobSpec, place: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a job changes when it runs at another place, by the fields of `JobSpec`."""
    place = {name: value for name, value in place.items() if value is not None}
    infra, gpus = place.get("infra", spec.infra), place.get("gpus", spec.gpus)
    elsewhere, another = infra != spec.infra, gpus != spec.gpus
    changes: dict[str, Any] = {}
    if elsewhere or another:
        changes |= {"price_usd_per_h": None, "on_demand_usd_per_h": None}
        changes["node"] = spec.node.model_copy(update={"instance_type": None})
    if elsewhere:
        bought_at = spec.on_demand_infra
        if bought_at is not None and kind_of(bought_at) != kind_of(infra):
            changes["on_demand_infra"] = None
        if spec.template in PLACES:  # that of a kind of place, which the next may not be
            changes["template"] = "base"
        image = spec.node.image
        if image is not None and spec.infra.split("/")[0] in CLOUDS and ":" not in image:
            changes["node"] = changes["node"].model_copy(update={"image": None})
    if another and spec.nproc_per_node == max(1, gpu_count(spec.gpus)):
        changes["nproc_per_node"] = max(1, gpu_count(gpus))
    return {**changes, **place}
