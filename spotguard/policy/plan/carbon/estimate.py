"""From devices and hours to kilowatt-hours and CO2e. Unknown in, unknown out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.policy.plan.carbon import factors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from spotguard.launch.base import Offer
    from spotguard.policy.plan.carbon.factors import Factor

GREEN = "green"
"""What `prefer` says for the greener of places that cost the same."""
_TIE = 0.05
"""Prices that differ by less than this are the same to who prefers green."""


@dataclass(frozen=True, kw_only=True)
class NodeDevices:
    """What a node draws power with."""

    gpu: str | None
    """SkyPilot's name of its GPUs; None has none."""
    gpus: int
    vcpus: float | None
    """Counted where there is no GPU; None is unknown."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What one node causes in an hour, at the wall of its data centre."""

    kwh_per_h: float
    """With what cooling and power supplies take, which is measured nowhere."""
    device_kwh_per_h: float
    """Of its devices alone."""
    g_per_kwh: float
    pue: float
    factors: tuple[Factor, ...]

    @property
    def g_per_h(self) -> float:
        """Grams of CO2e in an hour."""
        return self.kwh_per_h * self.g_per_kwh


def machine(gpus: str | None, cpus: str | None, *, processes: int, is_local: bool) -> NodeDevices:
    """Return what a node of a job is made of.

    Args:
        gpus: as the job asks for them: `A100:8`.
        cpus: the same of virtual CPUs: `8+`.
        processes: ranks on a node; of a local one, each is taken for one CPU.
        is_local: whether the node is a process of this machine.
    """
    kind, _, count = (gpus or "").partition(",")[0].partition(":")
    asked = (cpus or "").rstrip("+")
    vcpus = float(asked) if asked else float(processes) if is_local else None
    return NodeDevices(gpu=kind or None, gpus=int(count or 1) if kind else 0, vcpus=vcpus)


def draw(cloud: str, region: str | None, node: NodeDevices) -> Draw | None:
    """Return what such a node draws and causes there; None if its devices are not known."""
    used: list[Factor] = []
    if node.gpu is not None:
        power = factors.device(node.gpu)
        if power is None:
            return None
        used += [power, factors.FULL_LOAD]
        watts = node.gpus * power.value * factors.FULL_LOAD.value
    elif node.vcpus is not None:
        used.append(power := factors.vcpu(cloud))
        watts = node.vcpus * power.value
    else:
        return None
    pue, grid = factors.pue(cloud), factors.grid(cloud, region)
    return Draw(
        kwh_per_h=watts * pue.value / 1000,
        device_kwh_per_h=watts / 1000,
        g_per_kwh=grid.value,
        pue=pue.value,
        factors=(*used, pue, grid),
    )


def greener_first(offers: Sequence[Offer], node_of: Callable[[Offer], NodeDevices]) -> list[Offer]:
    """Return the offers, of those that cost the same within 5 % the greener ones first.

    `node_of` says what a node of an offer is made of.

    The cheapest that is left begins a group: who is within 5 % of it, of its market, is in it. One
    without a price, or whose draw is unknown, keeps its place behind those that are known.
    """
    left = list(offers)
    ordered: list[Offer] = []
    while left:
        first = left[0]
        group = [offer for offer in left if offer is first or _ties(first, offer)]
        ordered += sorted(group, key=lambda offer: _grams(offer, node_of(offer)))
        left = [offer for offer in left if offer not in group]
    return ordered


def _ties(first: Offer, other: Offer) -> bool:
    price, least = other.price_usd_per_h, first.price_usd_per_h
    if price is None or least is None or first.market is not other.market:
        return False
    return price <= least * (1 + _TIE)


def _grams(offer: Offer, node: NodeDevices) -> float:
    causes = draw(offer.infra, offer.region, node)
    return float("inf") if causes is None else causes.g_per_h
