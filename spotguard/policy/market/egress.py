"""What it costs to bring a checkpoint from its store to nodes elsewhere, at list prices.

The store's cloud charges for it. The prices, USD per GB, are those of the first tier:

- between regions of AWS: https://aws.amazon.com/ec2/pricing/on-demand/#Data_Transfer, 2025
- between locations of Google Cloud: https://cloud.google.com/storage/pricing#network-buckets, 2025
- between regions of Azure: https://azure.microsoft.com/pricing/details/bandwidth/, 2025
- to the internet, which another cloud is: as SkyPilot's `Cloud.get_egress_cost` has it
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple
from urllib.parse import parse_qs, urlsplit

GB: Final = 1e9
_CLOUDS: Final = {"s3": "aws", "gs": "gcp", "az": "azure"}
_INTERNET_USD: Final = {"aws": 0.09, "gcp": 0.12, "azure": 0.0875}
_SOMEWHERE: Final = frozenset({"local", "slurm", "ssh", "kubernetes", "k8s"})
"""Machines of which nobody knows how far from the store they are."""
_AWS_USD: Final = {
    "us": 0.02,
    "ca": 0.02,
    "eu": 0.02,
    "mx": 0.08,
    "il": 0.08,
    "me": 0.1105,
    "me-central-1": 0.085,
    "ap": 0.09,
    "ap-south-1": 0.086,
    "ap-south-2": 0.086,
    "ap-northeast-2": 0.08,
    "ap-southeast-2": 0.098,
    "ap-southeast-3": 0.1,
    "ap-southeast-4": 0.1,
    "ap-southeast-5": 0.08,
    "ap-southeast-6": 0.098,
    "ap-southeast-7": 0.08,
    "ap-east-2": 0.08,
    "sa": 0.138,
    "af": 0.147,
}
"""Out of a region, or of all regions whose names begin so, to any other; some pairs differ."""
_NEAR_USD, _ATLANTIC_USD, _FAR_USD = 0.02, 0.05, 0.08
"""Of Google Cloud and Azure: within North America or Europe, between them, and all else."""


class StorePlace(NamedTuple):
    """Where a store is."""

    cloud: str
    region: str | None
    """None: its URL does not say it."""


def store_place(url: str) -> StorePlace | None:
    """Return where a store is; None for a folder, and for a server that is no cloud's own.

    A bucket of S3 is where `?region=` says, else where AWS's variables say.
    """
    parts = urlsplit(url)
    cloud = _CLOUDS.get(parts.scheme)
    settings = parse_qs(parts.query)
    if cloud is None or "endpoint" in settings:
        return None
    region = settings.get("region", [None])[0]
    if cloud == "aws":
        region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return StorePlace(cloud, region)


def egress_usd(store: StorePlace | None, infra: str, region: str | None, size: float) -> float:
    """Return what it costs to read so many bytes of a store on nodes of a cloud's region.

    Where nobody knows how far apart they are, it is taken to be free.
    """
    if store is None or infra in _SOMEWHERE or size <= 0:
        return 0.0
    if infra != store.cloud:
        return _INTERNET_USD[store.cloud] * size / GB
    if store.region is None or region is None or region == store.region:
        return 0.0
    return _between_regions(store, region) * size / GB


def _between_regions(store: StorePlace, region: str) -> float:
    here = store.region or ""
    if store.cloud == "aws":
        if {here, region} == {"us-east-1", "us-east-2"}:
            return 0.01
        return _AWS_USD.get(here, _AWS_USD.get(here.partition("-")[0], _FAR_USD))
    continents = {_continent(here), _continent(region)}
    if None in continents:
        return _FAR_USD
    return _NEAR_USD if len(continents) == 1 else _ATLANTIC_USD


def _continent(region: str) -> str | None:
    """Return `america` or `europe` for a region of Google Cloud or Azure; None for all else."""
    if region.startswith(("us-", "northamerica-", "canada")) or region.rstrip("0123456789") in (
        "eastus",
        "westus",
        "centralus",
        "northcentralus",
        "southcentralus",
        "westcentralus",
    ):
        return "america"
    names = ("uk", "france", "germany", "norway", "sweden", "switzerland", "italy", "poland")
    european = region.startswith(("europe-", *names)) or region in ("northeurope", "westeurope")
    return "europe" if european else None
