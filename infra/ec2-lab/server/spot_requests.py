"""The spot request behind each spot instance, as far as it says when and why that one ended."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING

from nodes import LIVE, Node, market_of, nodes
from prices import filtered

if TYPE_CHECKING:
    from collections.abc import Mapping

_BY_EC2 = "instance-terminated-no-capacity"
_BY_USER = "instance-terminated-by-user"


def describe(region: str, form: Mapping[str, list[str]]) -> str:
    """Answer DescribeSpotInstanceRequests; of the filters, `instance-id` alone is heeded."""
    wanted = filtered(form, "instance-id")
    items = "".join(
        _item(node)
        for node in list(nodes.values())
        if node.instance.region_name == region
        and market_of(node.instance) == "spot"
        and (not wanted or node.id in wanted)
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        '<DescribeSpotInstanceRequestsResponse xmlns="http://ec2.amazonaws.com/doc/2016-11-15/">'
        f"<requestId>ec2-lab</requestId><spotInstanceRequestSet>{items}</spotInstanceRequestSet>"
        "</DescribeSpotInstanceRequestsResponse>"
    )


def _item(node: Node) -> str:
    begun_at, ended_at = node.billed[-1] if node.billed else (node.launched_at, None)
    lives = node.instance.state in LIVE
    by_user = str(node.instance.state_reason.code or "").startswith("Client.")
    code = "fulfilled" if lives else _BY_USER if by_user else _BY_EC2
    at = begun_at if ended_at is None else ended_at
    told = datetime.fromtimestamp(at or 0.0, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")
    return (
        f"<item><spotInstanceRequestId>sir-{node.id[2:10]}</spotInstanceRequestId>"
        f"<instanceId>{node.id}</instanceId><state>{'active' if lives else 'closed'}</state>"
        f"<status><code>{code}</code><updateTime>{told}</updateTime></status></item>"
    )
