"""The lab's verbs, below `/_lab/`: blows to instances, what a zone has, what calls meet."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import account
import journal
import prices
import settings
from gate import Rule
from nodes import Node, chosen, market_of, nodes

if TYPE_CHECKING:
    from collections.abc import Callable

    from gate import Gate

Query: TypeAlias = dict[str, str]
"""What follows the question mark."""


def books(_: Query) -> list[dict[str, Any]]:
    """Return each instance that ever was, with when EC2 began and ceased to charge it, and what."""
    return [_entry(node) for node in nodes.values()]


def _entry(node: Node) -> dict[str, Any]:
    instance = node.instance
    kind, zone, market = instance.instance_type, instance.placement.zone, market_of(instance)
    return {
        "id": node.id,
        "state": instance.state,
        "reason": instance.state_reason.code,
        "zone": zone,
        "market": market,
        "type": kind,
        "ip": instance.private_ip,
        "public": instance.public_ip,
        "name": node.name,
        "launched_at": node.launched_at,
        "billed": node.billed,
        "usd": sum(
            prices.cost_usd(kind, zone, market, begin_at, end_at)
            for begin_at, end_at in node.billed
            if begin_at is not None and end_at is not None
        ),
        "alive": node.alive,
    }


def capacity(query: Query) -> dict[str, int]:
    """Let a zone give so many instances of a market, or any number."""
    if "zone" in query:
        key = query["zone"], query.get("market", "spot")
        account.capacity.pop(key, None)
        if query.get("n", "any") != "any":
            account.capacity[key] = int(query["n"])
        journal.note(f"capacity of {' '.join(key)}: {query.get('n', 'any')}")
    return {" ".join(key): n for key, n in account.capacity.items()}


def quota(query: Query) -> dict[str, tuple[int, float]]:
    """Let the account have so many vCPUs in a region and a market; 0 is any number."""
    if "vcpus" in query:
        vcpus, market = int(query["vcpus"]), query.get("market", "spot")
        wanted = query.get("region", "*")
        for region in settings.REGIONS if wanted == "*" else [wanted]:
            account.quotas.pop((region, market), None)
            if vcpus:
                account.quotas[region, market] = vcpus, float(query.get("seconds", 0))
        journal.note(f"quota of {market} vCPUs in {wanted}: {vcpus or 'any'}")
    return {" ".join(key): each for key, each in account.quotas.items()}


def price(query: Query) -> list[str]:
    """Let the spot price of a zone be another one from now on."""
    usd, notice_s = float(query["usd"]), float(query.get("seconds", 120))
    return account.change_price(query["zone"], usd, query.get("type"), notice_s)


def _each(query: Query, act: Callable[[Node], object]) -> list[str]:
    done = []
    for node in chosen(query.get("id", "all")):
        act(node)
        done.append(node.id)
    return done


def interrupt(query: Query) -> list[str]:
    """Announce the end of spot instances, and end them."""
    seconds = float(query.get("seconds", 120))
    warn = query.get("warn", "1") == "1"
    return _each(query, lambda node: account.interrupt(node, seconds, warn=warn))


def rebalance(query: Query) -> list[str]:
    """Let the metadata service recommend a rebalance."""

    def recommend(node: Node) -> None:
        node.tell({**node.told(), "rebalance": int(time.time())})
        journal.note(f"{node.id} is recommended to leave")

    return _each(query, recommend)


def crash(query: Query) -> list[str]:
    """Let the hardware of instances fail."""
    return _each(query, account.crash)


def cut(query: Query) -> list[str]:
    """Let nobody reach instances."""
    return _each(query, lambda node: node.cut(True))


def heal(query: Query) -> list[str]:
    """Let everybody reach them again."""
    return _each(query, lambda node: node.cut(False))


class Verbs:
    """All verbs by name."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        plain = (books, capacity, quota, price, interrupt, rebalance, crash, cut, heal)
        self._known: dict[str, Callable[[Query], Any]] = {verb.__name__: verb for verb in plain}
        self._known |= {
            "events": lambda _: journal.events,
            "calls": lambda _: journal.calls(),
            "fault": self._fault,
            "policy": self._policy,
            "calm": self._calm,
        }

    def __call__(self, name: str, query: Query) -> Any:
        """Do it, and return what there is to say.

        Raises:
            KeyError: there is no such verb, or a word is missing.
            ValueError: a word makes no sense.
        """
        return self._known[name](query)

    def _fault(self, query: Query) -> list[str]:
        """Let calls fail: `throttle`, `error`, `lost` (done, but not answered), `slow`, `deny`."""
        if "action" in query:
            times = query.get("times", "1")
            rule = Rule(
                action=query["action"],
                kind=query["kind"],
                times=None if times == "all" else int(times),
                seconds=float(query.get("seconds", 0)),
                who=query.get("who", "*"),
                region=query.get("region", "*"),
            )
            self._gate.rules.append(rule)
            journal.note(f"{rule.action} will meet {rule.kind}, {times} times")
        return [f"{rule.action} {rule.kind} {len(rule.hit)}" for rule in self._gate.rules]

    def _policy(self, query: Query) -> str:
        """Let S3 ask for the rights of a policy in the style of infra/iam; without a file, none."""
        if not query.get("file"):
            self._gate.policy = None
            return "none"
        text = Path(query["file"]).read_text()
        text = text.replace("BUCKET", query["bucket"]).replace("PREFIX", query["prefix"])
        self._gate.policy, self._gate.bucket = json.loads(text), query["bucket"]
        return query["file"]

    def _calm(self, query: Query) -> str:
        """Take back what was said of capacity, quotas, faults and rights; end every instance.

        With a region: only of that one; rights belong to none.
        """
        region = query.get("region")
        if region is None:
            self._gate.policy = None
        self._gate.rules[:] = [r for r in self._gate.rules if region not in (None, r.region)]
        for zone, market in list(account.capacity):
            if region in (None, zone[:-1]):
                del account.capacity[zone, market]
        for place, market in list(account.quotas):
            if region in (None, place):
                del account.quotas[place, market]
        for node in list(nodes.values()):
            if node.alive and region in (None, node.instance.region_name):
                node.cut(False)
                node.instance.terminate()
        return "calm"
