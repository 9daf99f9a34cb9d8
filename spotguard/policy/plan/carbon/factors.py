"""The factors of an estimate, each with its source and its year: devices, data centres, grids."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Factor:
    """One number of an estimate."""

    name: str
    """What it stands for: `power of an A100`."""
    value: float
    unit: str
    source: str
    """Who says so."""
    year: int
    """Of the data."""
    verified: bool = False
    """True if a page or a table that says so was looked up when this version was made; False if the
    number is known from elsewhere, or is an assumption."""


_SHEETS: Final = "NVIDIA data sheet, maximum power"
_DEVICES_W: Final[dict[str, tuple[float, int]]] = {
    "K80": (300, 2014),
    "M60": (300, 2015),
    "P4": (75, 2016),
    "P40": (250, 2016),
    "P100": (250, 2016),
    "V100": (300, 2018),
    "V100-32GB": (300, 2018),
    "T4": (70, 2018),
    "T4g": (70, 2021),
    "A10": (150, 2021),
    "A10G": (300, 2021),
    "L4": (72, 2023),
    "L40": (300, 2022),
    "L40S": (350, 2023),
    "A100": (400, 2020),
    "A100-80GB": (400, 2020),
    "H100": (700, 2022),
    "H100-MEGA": (700, 2022),
    "H200": (700, 2024),
    "B200": (1000, 2024),
}
"""By SkyPilot's names."""
_DEVICES_LOOKED_UP: Final = frozenset({"L4", "L40", "A100", "A100-80GB", "B200"})
_WATTS_PER_VCPU: Final = {"aws": 2.12, "gcp": 2.485, "azure": 2.27}
"""Half-way between idle and full load, as the source takes it where the load is not known."""
_OTHER_WATTS_PER_VCPU: Final = 2.29
_PUE: Final = {
    "aws": (1.15, "Amazon, data center sustainability, all sites", 2024, True),
    "gcp": (1.09, "Google, environmental report, all sites", 2024, False),
    "azure": (1.16, "Microsoft, datacenter efficiency, all sites", 2024, False),
}
_OTHER_PUE: Final = (1.56, "Uptime Institute, global data center survey, average", 2024, True)
_WORLD: Final = (480.0, "Ember, Global Electricity Review, world average", 2023, True)
_GRIDS_LOOKED_UP: Final = frozenset({"gcp"})
"""Clouds whose rows of `grid.csv` were compared with the cloud's own table."""

FULL_LOAD: Final = Factor(
    name="utilisation of the device",
    value=1.0,
    unit="of its maximum power",
    source="Lacoste et al., Quantifying the Carbon Emissions of Machine Learning: an upper bound",
    year=2019,
)
CAR: Final = Factor(
    name="driving a passenger car",
    value=0.249,
    unit="kg CO2e per km",
    source="EPA, a typical passenger vehicle: 400 g a mile",
    year=2024,
)


def device(kind: str) -> Factor | None:
    """Return what a GPU draws at most; None if it is not known."""
    known = _DEVICES_W.get(kind)
    if known is None:
        return None
    watts, year = known
    return Factor(
        name=f"power of one {kind}",
        value=watts,
        unit="W",
        source=_SHEETS,
        year=year,
        verified=kind in _DEVICES_LOOKED_UP,
    )


def vcpu(cloud: str) -> Factor:
    """Return what a virtual CPU of a cloud draws at half load."""
    return Factor(
        name="power of one vCPU at half load",
        value=_WATTS_PER_VCPU.get(cloud, _OTHER_WATTS_PER_VCPU),
        unit="W",
        source="Cloud Carbon Footprint, methodology"
        + ("" if cloud in _WATTS_PER_VCPU else ", average of three clouds"),
        year=2023,
        verified=True,
    )


def pue(cloud: str) -> Factor:
    """Return how much more than its machines a data centre of a cloud draws."""
    value, source, year, verified = _PUE.get(cloud, _OTHER_PUE)
    return Factor(
        name="PUE", value=value, unit="kWh per kWh", source=source, year=year, verified=verified
    )


def grid(cloud: str, region: str | None) -> Factor:
    """Return how much CO2e a kilowatt-hour causes in a region; the world's average if unknown."""
    known = (cloud, region or "") in _regions()
    value, source, year, verified = _regions().get((cloud, region or ""), _WORLD)
    return Factor(
        name=f"grid of {region}" if known else "grid, region unknown",
        value=value,
        unit="g CO2e per kWh",
        source=source,
        year=year,
        verified=verified,
    )


@cache
def _regions() -> dict[tuple[str, str], tuple[float, str, int, bool]]:
    table = resources.files("spotguard.policy.plan.carbon").joinpath("grid.csv").read_text("utf-8")
    return {
        (row["cloud"], row["region"]): (
            float(row["g_per_kwh"]),
            row["source"],
            int(row["year"]),
            row["cloud"] in _GRIDS_LOOKED_UP,
        )
        for row in csv.DictReader(table.splitlines())
    }
