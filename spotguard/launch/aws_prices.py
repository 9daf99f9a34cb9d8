"""What spot nodes cost on AWS over the last days, as the user's own account is told."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Final

from spotguard.errors import EnvironmentFailure, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

RIGHT: Final = "ec2:DescribeSpotPriceHistory"
LONGEST_DAYS: Final = 90
"""AWS remembers no more."""
_ASK_WITHIN_S = 20.0


@dataclass(frozen=True, kw_only=True)
class PricePoint:
    """A price that held from an instant on."""

    at: float
    region: str
    zone: str
    instance_type: str
    usd_per_h: float


def spot_prices(
    region: str, instance_types: Sequence[str], *, days: float, now: float
) -> list[PricePoint]:
    """Return the prices of Linux spot nodes of the last days, by time. Blocks for some seconds.

    Raises:
        MissingExtra: boto3 is not installed.
        EnvironmentFailure: there are no credentials, or AWS refuses or does not answer.
    """
    try:
        from boto3.session import Session
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        raise MissingExtra(
            "spot prices of AWS need boto3, which is not installed",
            hint="pip install 'spotguard[aws]'",
        ) from None
    config = Config(connect_timeout=_ASK_WITHIN_S, read_timeout=_ASK_WITHIN_S)
    since = datetime.fromtimestamp(now, tz=timezone.utc) - timedelta(days=days)
    try:
        client: Any = Session().client("ec2", region_name=region, config=config)
        pages = client.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=list(instance_types),
            ProductDescriptions=["Linux/UNIX"],
            StartTime=since,
        )
        found = [point for page in pages for point in _points(page, region)]
    except ClientError as problem:
        told = problem.response.get("Error", {})
        raise EnvironmentFailure(
            f"AWS does not tell spot prices of {region}: {told.get('Message', problem)}",
            hint=f"the account needs the right {RIGHT}; see `spotguard doctor`",
        ) from problem
    except (BotoCoreError, ValueError) as problem:
        raise EnvironmentFailure(
            f"AWS cannot be asked for spot prices of {region}: {problem}",
            hint="check the credentials and the region; see `spotguard doctor`",
        ) from problem
    return sorted(found, key=lambda point: point.at)


def _points(page: Any, region: str) -> Iterator[PricePoint]:
    """Return what a page says; entries that make no sense are passed over."""
    for entry in page.get("SpotPriceHistory", []):
        try:
            usd_per_h = float(entry["SpotPrice"])
            at = entry["Timestamp"].timestamp()
            zone, kind = str(entry["AvailabilityZone"]), str(entry["InstanceType"])
        except (KeyError, ValueError, AttributeError):
            continue
        if 0 <= usd_per_h < 1e6:
            yield PricePoint(
                at=at, region=region, zone=zone, instance_type=kind, usd_per_h=usd_per_h
            )
