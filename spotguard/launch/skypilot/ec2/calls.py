"""EC2 as all of this package ask it: a client, and the instances that it lists."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import requests

from spotguard.launch.taskyaml import CLUSTER_TAG

if TYPE_CHECKING:
    from collections.abc import Sequence

_SKYPILOTS_MARK = "skypilot-head-node"
"""A tag that SkyPilot gives to each instance once it has the answer to its order."""


def can_ask() -> bool:
    """Return whether boto3 is installed."""
    return find_spec("boto3") is not None


def unanswered() -> tuple[type[Exception], ...]:
    """Return what boto3 raises where EC2 refuses, does not answer, or a proxy answers in its place.

    An answer that is not EC2's XML is a `ResponseParserError`, which is no `BotoCoreError`.
    """
    from botocore.exceptions import BotoCoreError, ClientError
    from botocore.parsers import ResponseParserError

    return BotoCoreError, ClientError, ResponseParserError, OSError


def catalogue_problems() -> tuple[type[Exception], ...]:
    """Return what SkyPilot's catalogues raise where they, or AWS of an account, are out of reach.

    AWS is asked for the regions and zones of one when somebody first wants to know something of it.
    What SkyPilot understands of a refusal becomes a `RuntimeError`.
    """
    of_any = (RuntimeError, requests.RequestException, OSError)
    return (*of_any, *unanswered()) if can_ask() else of_any


def client_of(region: str, *, within_s: float, tries: int) -> Any:
    """Return boto3's client for a region, whose calls are tried so often, each so long."""
    from boto3.session import Session
    from botocore.config import Config

    config = Config(
        connect_timeout=within_s,
        read_timeout=within_s,
        retries={"total_max_attempts": tries, "mode": "standard"},
    )
    return Session().client("ec2", region_name=region, config=config)


def instances_of(client: Any, clusters: Sequence[str], *, states: Sequence[str] = ()) -> list[Any]:
    """Return EC2's words on the instances of clusters, by our tag; only those in some states.

    Blocks for some seconds at most. Raises what boto3 raises.
    """
    filters = [{"Name": f"tag:{CLUSTER_TAG}", "Values": list(clusters)}]
    if states:
        filters.append({"Name": "instance-state-name", "Values": list(states)})
    return [
        each
        for page in client.get_paginator("describe_instances").paginate(Filters=filters)
        for reservation in page["Reservations"]
        for each in reservation["Instances"]
    ]


def tags_of(instance: Any) -> dict[str, str]:
    """Return the tags of an instance, by EC2's words on it."""
    return {tag["Key"]: tag["Value"] for tag in instance.get("Tags") or ()}


def is_known(instance: Any) -> bool:
    """Return whether SkyPilot knows an instance that was launched for it."""
    return _SKYPILOTS_MARK in tags_of(instance)


def was_ordered(instance: Any) -> bool:
    """Return whether an instance ended because somebody asked EC2 for it."""
    code = str((instance.get("StateReason") or {}).get("Code", ""))
    return code.startswith("Client.UserInitiated")


def cluster_of(instance: Any) -> str:
    """Return the cluster of ours to which an instance belongs."""
    return tags_of(instance)[CLUSTER_TAG]
