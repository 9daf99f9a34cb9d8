"""Where nodes can be had and for how much, from SkyPilot's catalogues and configuration.

On clouds the catalogue holds a price for each machine and zone, in both markets. On Kubernetes
and Slurm a price is what the user's SkyPilot configuration says; SkyPilot takes a missing one for
zero, here it is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import requests

from spotguard.errors import EnvironmentFailure
from spotguard.events.states import Market
from spotguard.launch.base import Offer, PriceSource, Skipped, Survey
from spotguard.launch.skypilot.ec2.calls import catalogue_problems
from spotguard.launch.skypilot.import_sky import load_sky, off_stdout
from spotguard.launch.taskyaml import BUYS_SPOT, infra_of
from spotguard.shared.paths import expanded

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from spotguard.launch.taskyaml import Machine

_TYPES = 3
"""Instance types looked at for each place: the catalogue names the cheapest first."""
_VIRTUAL = {"cpus": "2", "memory": "0"}
"""What a Slurm or Kubernetes node has when nobody says it."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where to look, as far as the user says it."""

    infra: str
    region: str | None = None
    zone: str | None = None

    @classmethod
    def parse(cls, text: str) -> Place:
        """Return the place for `aws`, `aws/us-east-1`, `slurm/CLUSTER/PARTITION`."""
        infra, _, below = text.partition("/")
        parts = [below] if infra == "kubernetes" else below.split("/")  # contexts hold slashes
        region, zone = (*parts, "", "")[:2]
        return cls(infra=infra, region=region or None, zone=zone or None)

    def __str__(self) -> str:
        return "/".join(part for part in (self.infra, self.region, self.zone) if part)


class _Machine(NamedTuple):
    region: str
    zone: str | None
    instance_type: str


_Prices = dict[_Machine, float]


class _NotThere(Exception):
    """A place has no such machine; says why."""


def survey(
    places: Sequence[Place],
    machine: Machine,
    *,
    market: Market,
    on_demand_places: Sequence[Place] = (),
) -> Survey:
    """Return the offers of these places in both markets, the cheapest first, and who was skipped.

    Args:
        places: where `market` nodes come from; on clouds, on-demand ones too. Once there are
            `on_demand_places`, none but spot ones.
        machine: what a node must be.
        market: what nodes of places without a market of their own (Slurm, Kubernetes) count as.
        on_demand_places: where on-demand nodes come from, if elsewhere.

    Raises:
        MissingExtra: SkyPilot is not installed.
        EnvironmentFailure: a catalogue can be neither read nor fetched.
    """
    infras = dict.fromkeys(place.infra for place in (*places, *on_demand_places))
    try:
        with off_stdout():
            offers, skipped = _look_everywhere(places, machine, market, on_demand_places)
            sources = tuple(map(_source, infras))
    except (requests.RequestException, OSError) as problem:
        raise EnvironmentFailure(
            f"SkyPilot's prices can be neither read nor fetched: {_first_line(problem)}",
            hint="is this machine online? SkyPilot keeps them in ~/.sky/catalogs",
        ) from problem
    except catalogue_problems() as problem:
        raise EnvironmentFailure(
            f"SkyPilot does not learn where your account may have nodes: {_first_line(problem)}",
            hint="try again; of a right that is missing, ask who gives rights in this account",
        ) from problem
    return Survey(
        offers=tuple(sorted(_with_on_demand(offers), key=rank)),
        skipped=tuple(skipped),
        sources=sources,
    )


def _look_everywhere(
    places: Sequence[Place],
    machine: Machine,
    market: Market,
    on_demand_places: Sequence[Place],
) -> tuple[list[Offer], list[Skipped]]:
    offers: list[Offer] = []
    skipped: list[Skipped] = []
    for place in places:
        if place.infra in BUYS_SPOT:
            markets = (Market.SPOT,) if on_demand_places else (Market.SPOT, Market.ON_DEMAND)
            _look(place, machine, markets, offers, skipped)
        elif market is Market.SPOT or not on_demand_places:
            offers.append(_configured(place, machine, market))
    for place in on_demand_places:
        if place.infra in BUYS_SPOT:
            _look(place, machine, (Market.ON_DEMAND,), offers, skipped)
        else:
            offers.append(_configured(place, machine, Market.ON_DEMAND))
    return offers, skipped


def rank(offer: Offer) -> tuple[bool, float, str]:
    """Return what offers are ordered by: the cheapest first, those without a price last."""
    price = offer.price_usd_per_h
    return price is None, price or 0.0, infra_of(offer)


def _with_on_demand(offers: Sequence[Offer]) -> Iterable[Offer]:
    """Yield the offers; where a place does not know its on-demand price, the cheapest other's."""
    known = [o.price_usd_per_h for o in offers if o.market is Market.ON_DEMAND]
    least = min((price for price in known if price is not None), default=None)
    for offer in offers:
        price = offer.on_demand_usd_per_h
        yield replace(offer, on_demand_usd_per_h=least if price is None else price)


# ---------------------------------------------------------------- clouds


def _look(
    place: Place,
    machine: Machine,
    markets: Sequence[Market],
    offers: list[Offer],
    skipped: list[Skipped],
) -> None:
    """Add what a cloud's place offers in these markets, and why it does not."""
    prices: dict[Market, _Prices] = {}
    for market in (Market.SPOT, Market.ON_DEMAND):
        try:
            prices[market] = _prices(place, machine, use_spot=market is Market.SPOT)
        except _NotThere as problem:
            prices[market] = {}
            if market in markets:
                skipped.append(Skipped(place=str(place), market=market, why=str(problem)))
    on_demand = prices[Market.ON_DEMAND]
    for market in markets:
        best = _cheapest(prices[market])
        offers += [_offer(place.infra, market, where, best[where], on_demand) for where in best]
        places_with = {(where.region, where.zone) for where in best}
        if best:
            skipped += [
                Skipped(place=str(Place(infra=place.infra, region=r, zone=z)), market=market,
                        why=f"has no {_words(market)} price")
                for r, z in sorted({(w.region, w.zone) for w in on_demand} - places_with, key=str)
            ]  # fmt: skip


def _offer(infra: str, market: Market, where: _Machine, price: float, on_demand: _Prices) -> Offer:
    return Offer(
        infra=infra,
        region=where.region,
        zone=where.zone,
        instance_type=where.instance_type,
        market=market,
        price_usd_per_h=price,
        on_demand_usd_per_h=on_demand.get(where),
    )


def _cheapest(prices: _Prices) -> _Prices:
    """Return one machine for each zone."""
    best: dict[tuple[str, str | None], _Machine] = {}
    for where, price in prices.items():
        old = best.get((where.region, where.zone))
        if old is None or price < prices[old]:
            best[where.region, where.zone] = where
    return {where: prices[where] for where in best.values()}


def _prices(place: Place, machine: Machine, *, use_spot: bool) -> _Prices:
    """Return the price of each fitting machine in each zone that has one."""
    sky = load_sky()
    found: _Prices = {}
    for instance_type in _instance_types(place, machine, use_spot):
        try:
            resources = sky.Resources(
                infra=str(place),
                instance_type=instance_type,
                accelerators=machine.gpus,
                use_spot=use_spot,
            )
            regions = resources.get_valid_regions_for_launchable()
        except ValueError as problem:
            raise _NotThere(_first_line(problem)) from problem
        for region in regions:
            for zone in [zone.name for zone in region.zones or ()] or [None]:
                price = _price(resources.copy(region=region.name, zone=zone))
                if price is not None:
                    found[_Machine(region.name, zone, instance_type)] = price
    if not found:
        raise _NotThere(f"has no {_words(Market.SPOT if use_spot else Market.ON_DEMAND)} price")
    return found


def _price(resources: Any) -> float | None:
    try:
        price = resources.get_cost(3600.0)
    except (ValueError, AssertionError):  # how SkyPilot's catalogue says that a row is missing
        return None
    return round(float(price), 6) if price > 0 else None  # also for NaN


def _instance_types(place: Place, machine: Machine, use_spot: bool) -> Sequence[str]:
    catalog = load_sky().catalog
    where = {"region": place.region, "zone": place.zone, "clouds": place.infra}
    size = {"cpus": machine.cpus, "memory": machine.memory}
    try:
        catalog.validate_region_zone(place.region, place.zone, clouds=place.infra)
        if machine.instance_type:
            return (machine.instance_type,)
        if not machine.gpus:
            found = catalog.get_default_instance_type(**size, use_spot=use_spot, **where)
            types, others = [found] if found else [], []
        else:
            name, _, count = machine.gpus.partition(":")
            types, others = catalog.get_instance_type_for_accelerator(
                name, int(count), **size, use_spot=use_spot, **where
            )
    except ValueError as problem:  # such as a region that a cloud does not have
        raise _NotThere(_first_line(problem)) from problem
    if not types:
        near = f"; it has {', '.join(others[:3])}" if others else ""
        raise _NotThere(f"has no {machine.gpus or 'such machine'}{near}")
    return list(types)[:_TYPES]


# ---------------------------------------------------------------- prices that the user sets


def _configured(place: Place, machine: Machine, market: Market) -> Offer:
    """Return a place whose price is what SkyPilot's configuration says."""
    price: float = load_sky().catalog.get_hourly_cost(
        _virtual_type(machine), False, place.region, place.zone, clouds=place.infra
    )
    return Offer(
        infra=place.infra,
        region=place.region,
        zone=place.zone,
        instance_type=None,
        market=market,
        price_usd_per_h=price or None,
        on_demand_usd_per_h=(price or None) if market is Market.ON_DEMAND else None,
    )


def _virtual_type(machine: Machine) -> str:
    """Return SkyPilot's name for a machine without a type: `2CPU--8GB--A100:8`."""
    cpus, memory = (
        (value or _VIRTUAL[name]).rstrip("+")
        for name, value in (("cpus", machine.cpus), ("memory", machine.memory))
    )
    gpus = f"--{machine.gpus}" if machine.gpus else ""
    return f"{cpus}CPU--{memory}GB{gpus}"


# ---------------------------------------------------------------- SkyPilot


def _source(infra: str) -> PriceSource:
    if infra in BUYS_SPOT:
        path = Path(load_sky().catalog.common.get_catalog_path(f"{infra}/vms.csv"))
        source = "SkyPilot's catalogue"
    else:
        path = expanded("~/.sky/config.yaml")
        source = "SkyPilot's configuration"
    read_at = path.stat().st_mtime if path.exists() else None
    return PriceSource(infra=infra, source=source, read_at=read_at)


def _words(market: Market) -> str:
    return str(market).replace("_", "-")


def _first_line(problem: Exception) -> str:
    return str(problem).strip().partition("\n")[0]
