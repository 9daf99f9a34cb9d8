"""What an instance costs: the spot price of each zone as it changes, and the on-demand price."""

from __future__ import annotations

import csv
import threading
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

import settings
from moto.ec2 import ec2_backends

if TYPE_CHECKING:
    from collections.abc import Mapping

_PRODUCT = "Linux/UNIX"
_DAYS_BEFORE = 30
_LEAST_S = 60.0


@dataclass(frozen=True)
class Change:
    """A spot price, and from when on it holds."""

    at: float
    instance_type: str
    zone: str
    usd: float


_changes: list[Change] = []
_on_demand: dict[tuple[str, str], float] = {}
_vcpus: dict[str, int] = {}
_zone_of_id: dict[str, str] = {}
_lock = threading.Lock()


def load() -> None:
    """Read what holds at first from SkyPilot's own catalogue, which names zones by their ids."""
    for region in settings.REGIONS:
        zones = ec2_backends[settings.ACCOUNT][region].zones[region]
        _zone_of_id.update({zone.zone_id: zone.name for zone in zones})
    long_ago = time.time() - _DAYS_BEFORE * 86400
    for row in _rows():
        zone = _zone_of_id.get(row["AvailabilityZone"])
        if zone is None:
            continue
        _on_demand[row["InstanceType"], row["Region"]] = float(row["Price"])
        _vcpus[row["InstanceType"]] = int(float(row["vCPUs"]))
        if row["SpotPrice"]:
            change = Change(long_ago, row["InstanceType"], zone, float(row["SpotPrice"]))
            _changes.append(change)


def vcpus(instance_type: str) -> int:
    """Return how many vCPUs an instance counts for, as the catalogue says."""
    return _vcpus.get(instance_type, 2)


def spot_usd_per_h(instance_type: str, zone: str, at: float | None = None) -> float | None:
    """Return what a spot instance costs there at an instant, now by default."""
    at = time.time() if at is None else at
    there = [c for c in _changes if (c.instance_type, c.zone) == (instance_type, zone)]
    held = [change for change in there if change.at <= at]
    return max(held, key=lambda change: change.at).usd if held else None


def on_demand_usd_per_h(instance_type: str, zone: str) -> float | None:
    """Return what an on-demand instance costs there."""
    return _on_demand.get((instance_type, zone[:-1]))


def cost_usd(instance_type: str, zone: str, market: str, begin_at: float, end_at: float) -> float:
    """Return what EC2 charges for an instance.

    By the second, a minute at least; each hour of a spot instance at the price that held when it
    began (aws.amazon.com/ec2/faqs, "How will I be charged").
    """
    end_at = max(end_at, begin_at + _LEAST_S)
    if market != "spot":
        return (on_demand_usd_per_h(instance_type, zone) or 0.0) * (end_at - begin_at) / 3600.0
    hours = [begin_at]
    while hours[-1] + 3600.0 < end_at:
        hours.append(hours[-1] + 3600.0)
    return sum(
        (spot_usd_per_h(instance_type, zone, one) or 0.0) * (next_one - one) / 3600.0
        for one, next_one in pairwise([*hours, end_at])
    )


def change(zone: str, usd: float, instance_type: str | None) -> list[str]:
    """Let another price hold from now on, and write it into the catalogue; return its types."""
    kinds = sorted({c.instance_type for c in _changes if c.zone == zone})
    kinds = [kind for kind in kinds if instance_type in (None, kind)]
    with _lock:
        _changes.extend(Change(time.time(), kind, zone, usd) for kind in kinds)
        rows = _rows()
        for row in rows:
            if row["InstanceType"] in kinds and _zone_of_id.get(row["AvailabilityZone"]) == zone:
                row["SpotPrice"] = f"{usd:.4f}"
        path = settings.CATALOGUE / "aws" / "vms.csv"
        fresh = path.with_suffix(".new")
        with fresh.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        fresh.replace(path)
    return kinds


def history(region: str, form: Mapping[str, list[str]]) -> str:
    """Answer DescribeSpotPriceHistory: newest first, with the price that held at the beginning."""
    kinds = _listed(form, "InstanceType") | filtered(form, "instance-type")
    zones = _listed(form, "AvailabilityZone") | filtered(form, "availability-zone")
    products = _listed(form, "ProductDescription") | filtered(form, "product-description")
    begin_at, end_at = _instant(form, "StartTime", 0.0), _instant(form, "EndTime", time.time())
    found = []
    for change in _changes:
        if change.zone[:-1] != region or change.at > end_at:
            continue
        if (kinds and change.instance_type not in kinds) or (zones and change.zone not in zones):
            continue
        if products and not any(product.startswith(_PRODUCT) for product in products):
            continue
        later = [
            other.at
            for other in _changes
            if (other.instance_type, other.zone) == (change.instance_type, change.zone)
            and change.at < other.at <= begin_at
        ]
        if not later:
            found.append(change)
    found.sort(key=lambda each: -each.at)
    first = int((form.get("NextToken") or ["0"])[0] or 0)
    size = int((form.get("MaxResults") or ["1000"])[0])
    page = found[first : first + size]
    following = str(first + size) if len(found) > first + size else ""
    items = "".join(
        f"<item><instanceType>{escape(each.instance_type)}</instanceType>"
        f"<productDescription>{_PRODUCT}</productDescription>"
        f"<spotPrice>{each.usd:.6f}</spotPrice>"
        f"<timestamp>{_utc(each.at)}</timestamp>"
        f"<availabilityZone>{each.zone}</availabilityZone></item>"
        for each in page
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        '<DescribeSpotPriceHistoryResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">'
        "<requestId>ec2-lab</requestId>"
        f"<spotPriceHistorySet>{items}</spotPriceHistorySet><nextToken>{following}</nextToken>"
        "</DescribeSpotPriceHistoryResponse>"
    )


def _rows() -> list[dict[str, str]]:
    with (settings.CATALOGUE / "aws" / "vms.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _listed(form: Mapping[str, list[str]], name: str) -> set[str]:
    return {
        value
        for key, values in form.items()
        if key == name or key.startswith(f"{name}.")
        for value in values
    }


def filtered(form: Mapping[str, list[str]], name: str) -> set[str]:
    """Return the values of a filter of a request; empty if it has none of that name."""
    numbers = [key.split(".")[1] for key, values in form.items() if values == [name]]
    return {
        value
        for number in numbers
        for key, values in form.items()
        if key.startswith(f"Filter.{number}.Value.")
        for value in values
    }


def _instant(form: Mapping[str, list[str]], name: str, otherwise: float) -> float:
    if name not in form:
        return otherwise
    told = datetime.fromisoformat(form[name][0].replace("Z", "+00:00"))
    return (told if told.tzinfo else told.replace(tzinfo=timezone.utc)).timestamp()


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")
