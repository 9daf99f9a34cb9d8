"""Whether there is such a region, zone, context, cluster or partition: asked before any launch.

SkyPilot refuses a place that is not there by the same error as all else, so its words are read.
What does not read like such a refusal (a login node that does not answer) proves nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.errors import LauncherFailure
from spotguard.launch.base import Unchecked
from spotguard.launch.skypilot.ask_in_subprocess import ask
from spotguard.launch.skypilot.ec2.calls import catalogue_problems
from spotguard.launch.skypilot.import_sky import load_sky, off_stdout
from spotguard.launch.taskyaml import BUYS_SPOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from spotguard.launch.skypilot.prices import Place

_MOST_NAMED = 12
_USUAL_CPUS = "2+"
_NOT_THERE = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"(?P<part>Cluster) (?P<name>\S+) not found in Slurm config.*clusters: \[(?P<all>.*)\]",
        r"(?P<part>Partition) '(?P<name>.+?)' not found in .*partitions: \[(?P<all>.*)\]",
        r"(?P<part>Context) (?P<name>\S+) not found in kubeconfig.*contexts: \[(?P<all>.*)\]",
        r"Invalid (?P<part>region|zone) '(?P<name>.+?)'(?P<all>.*)",
    )
)
"""How SkyPilot says that a place is not there, and what it has instead."""
_LISTED = re.compile(r"(?:regions|of these): '(.*?)'", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A place that is not there."""

    place: str
    """As a user writes it."""
    part: str
    """Which part of it: `region`, `zone`, `context`, `cluster` or `partition`."""
    name: str
    """What the user calls that part."""
    above: str
    """All before it: `slurm/lab`."""
    there: tuple[str, ...]
    """What there is instead; those that look alike where there are too many to name."""

    def words(self) -> str:
        """Return what is wrong, and what there is."""
        names = ", ".join(self.there[:_MOST_NAMED]) or "none with a name like it"
        more = len(self.there) - _MOST_NAMED
        rest = f" and {more} more" if more > 0 else ""
        return (
            f"given {self.place!r}, but SkyPilot has no {self.part} {self.name!r} in "
            f"{self.above}; there is {names}{rest}"
        )

    def way_out(self) -> str:
        """Return what to give instead."""
        below = "/PARTITION" if self.part == "cluster" else ""
        ways = [
            f"name one that is there, such as {self.above}/{name}{below}" for name in self.there[:1]
        ]
        if not self.above.startswith("slurm"):
            ways.append(f"leave it to SkyPilot: {self.above}")
        return ", or ".join(ways)


def look_up(places: Sequence[Place]) -> Iterable[Missing | Unchecked]:
    """Yield the places that are not there, and those of which nobody could say it.

    Catalogues know the regions and zones of clouds. Kubernetes contexts and Slurm partitions are
    asked for at SkyPilot's API server, which takes seconds.
    """
    named = [place for place in places if place.region or place.zone]
    for place in named:
        if place.infra in BUYS_SPOT:
            yield from _judged(place, _refusal_by_catalogue(place))
    asked = [place for place in named if place.infra not in BUYS_SPOT]
    if not asked:
        return
    try:
        answers = ask("refusals", *map(str, asked))
    except LauncherFailure as problem:
        answers = {str(place): {"problem": problem.message} for place in asked}
    for place in asked:
        answer = answers[str(place)]
        if "problem" in answer:
            yield Unchecked(place=str(place), why=answer["problem"])
        else:
            yield from _judged(place, answer["refusal"])


def _judged(place: Place, refusal: str) -> Iterable[Missing | Unchecked]:
    if not refusal:
        return
    for pattern in _NOT_THERE:
        if said := pattern.search(refusal):
            yield _not_there(place, said)
            return
    yield Unchecked(place=str(place), why=" ".join(refusal.split()))


def _not_there(place: Place, said: re.Match[str]) -> Missing | Unchecked:
    part = said["part"].lower()
    above = str(place).removesuffix(f"/{said['name']}")
    if part in ("region", "cluster", "context"):
        above = place.infra
    there = _names(part, place, said["all"])
    if not there and part in ("cluster", "context"):
        return Unchecked(place=str(place), why=f"SkyPilot knows no {part} at all on this machine")
    by_name = any(zone.startswith(str(place.region)) for zone in there)
    if part == "zone" and place.infra == "aws" and not by_name:
        # Without credentials SkyPilot knows the zones of AWS by their numbers only (use1-az1).
        return Unchecked(place=str(place), why="SkyPilot cannot tell this account's zones by name")
    return Missing(place=str(place), part=part, name=said["name"], above=above, there=there)


def _names(part: str, place: Place, told: str) -> tuple[str, ...]:
    if part == "zone":
        return _zones(place)
    if part == "region":
        listed = _LISTED.search(told)
        return tuple(listed[1].split(", ")) if listed else ()
    return tuple(name.strip(" '\"") for name in told.split(",") if name.strip(" '\""))


# ---------------------------------------------------------------- clouds


def _refusal_by_catalogue(place: Place) -> str:
    catalog = load_sky().catalog
    try:
        with off_stdout():
            catalog.validate_region_zone(place.region, place.zone, clouds=place.infra)
    except ValueError as problem:
        return str(problem)
    except catalogue_problems():
        return ""  # whoever asks for prices says so
    return ""


def _zones(place: Place) -> tuple[str, ...]:
    """Return the zones of the place's region, as far as usual machines are to be had there."""
    catalog = load_sky().catalog
    with off_stdout():
        usual = catalog.get_default_instance_type(
            cpus=_USUAL_CPUS, region=place.region, clouds=place.infra
        )
        if usual is None:
            return ()
        found = catalog.get_region_zones_for_instance_type(usual, False, clouds=place.infra)
    here = [region for region in found if region.name == place.region]
    return tuple(sorted({zone.name for region in here for zone in region.zones or ()}))
