"""An AWS account in moto whose instances are nodes: what RunInstances and the others do here."""

from __future__ import annotations

import itertools
import json
import threading
import time
from typing import TYPE_CHECKING, Any

import journal
import moto.ec2.models.elastic_network_interfaces as interfaces
import prices
import settings
from moto.ec2 import ec2_backends
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.amis import Ami, AmiBackend
from moto.ec2.models.instances import Instance, InstanceBackend
from moto.ec2.models.subnets import Subnet
from moto.iam import iam_backends
from nodes import LIVE, STATES, Node, lock, market_of, nodes, set_state

if TYPE_CHECKING:
    from collections.abc import Callable

_NO_SPOT = "There is no Spot capacity available that matches your request."
_SPOT_ENDED = "Server.SpotInstanceTermination"
capacity: dict[tuple[str, str], int] = {}
"""How many instances a zone gives in a market; absent: any number."""
quotas: dict[tuple[str, str], tuple[int, float]] = {}
"""How many vCPUs the account may have in a region and a market, and for how many seconds after its
end an instance still counts, as EC2 closes its books late; absent: any number."""

_run_instances = InstanceBackend.run_instances
_create_image = AmiBackend.create_image
_start, _stop, _terminate = Instance.start, Instance.stop, Instance.terminate
_next_address = Subnet.get_available_subnet_ip
_given_addresses: set[str] = set()


def install() -> None:
    """Put our acts in the place of moto's, and furnish the account as a new one is."""
    InstanceBackend.run_instances = _launch
    AmiBackend.create_image = _make_image
    Instance.start = _boot_again
    Instance.stop = _ended_by(_stop, "stopping")
    Instance.terminate = _ended_by(_terminate, "shutting-down")
    Subnet.get_available_subnet_ip = _unique_private_ip
    numbers = itertools.cycle(range(1, 255))
    interfaces.random_public_ip = lambda: f"{settings.PUBLIC}.{next(numbers)}"
    for region in settings.REGIONS:
        _furnish(region)
    if not settings.FRESH_ACCOUNT:
        _make_role()


def _unique_private_ip(self: Subnet, instance: Instance) -> str:
    """Return an address no other region has: the nodes share one bridge; four are AWS' own."""
    while True:
        address = str(_next_address(self, instance))
        if int(address.split(".")[-1]) > 3 and address not in _given_addresses:
            _given_addresses.add(address)
            return address


def _launch(
    self: Any, image_id: str, count: int, user_data: str, security_groups: list[str], **given: Any
) -> Any:
    """RunInstances: what the zone has, as nodes."""
    with lock:
        zone = _zone_of(self, given)
        market = "spot" if given.get("instance_market_options") else "on-demand"
        kind = str(given.get("instance_type") or "m5.large")
        _check_quota(zone[:-1], market, kind, int(count))
        _check_price(zone, market, kind)
        _check_capacity(zone, market, kind, int(count))
        reservation = _run_instances(self, image_id, count, user_data, security_groups, **given)
        for instance in reservation.instances:
            if market == "spot":
                instance.lifecycle = "spot"
            nodes[instance.id] = Node(instance, _terminate)
            nodes[instance.id].boot()
        return reservation


def keep_pending(instances: list[str], seconds: float) -> None:
    """Let instances be `pending` for so long, as EC2's are for a while; ours run at once."""
    with lock:
        for each in instances if seconds else []:
            set_state(nodes[each].instance, "pending")
            after = threading.Timer(seconds, _runs, args=(nodes[each],))
            after.daemon = True
            after.start()


def _runs(node: Node) -> None:
    with lock:
        if node.instance.state == "pending":
            set_state(node.instance, "running")


def _zone_of(backend: Any, given: dict[str, Any]) -> str:
    named = [nic["SubnetId"] for nic in given.get("nics") or [] if "SubnetId" in nic]
    subnet = given.get("subnet_id") or (named[0] if named else None)
    if subnet is not None:
        return str(backend.get_subnet(subnet).availability_zone)
    wanted = (given.get("placement") or {}).get("AvailabilityZone")
    return str(wanted or f"{backend.region_name}a")


def _check_price(zone: str, market: str, kind: str) -> None:
    """Refuse spot where it costs more than on demand: SkyPilot offers no more than that."""
    price, limit = prices.spot_usd_per_h(kind, zone), prices.on_demand_usd_per_h(kind, zone)
    if market == "spot" and price is not None and limit is not None and price > limit:
        words = f"Your Spot request price of {limit:.4f} is lower than the minimum of {price:.4f}."
        raise EC2ClientError("SpotMaxPriceTooLow", words)


def _check_capacity(zone: str, market: str, kind: str, count: int) -> None:
    there = sum(
        node.instance.placement.zone == zone
        and node.instance.state in LIVE
        and market_of(node.instance) == market
        for node in nodes.values()
    )
    if there + count <= capacity.get((zone, market), 1 << 30):
        return
    journal.note(f"no capacity for {count} {market} in {zone}")
    words = _NO_SPOT
    if market != "spot":
        words = (
            f"We currently do not have sufficient {kind} capacity in the Availability Zone you "
            f"requested ({zone})."
        )
    raise EC2ClientError("InsufficientInstanceCapacity", words)


def _check_quota(region: str, market: str, kind: str, count: int) -> None:
    limit, late_s = quotas.get((region, market), (1 << 30, 0.0))
    used = sum(
        prices.vcpus(node.instance.instance_type)
        for node in nodes.values()
        if node.instance.region_name == region
        and market_of(node.instance) == market
        and _counts(node, late_s)
    )
    if used + count * prices.vcpus(kind) <= limit:
        return
    journal.note(f"quota of {limit} {market} vCPUs in {region} is full: {used} are used")
    if market == "spot":
        raise EC2ClientError("MaxSpotInstanceCountExceeded", "Max spot instance count exceeded")
    words = f"You have requested more vCPU capacity than your current vCPU limit of {limit} allows."
    raise EC2ClientError("VcpuLimitExceeded", words)


def _counts(node: Node, late_s: float) -> bool:
    """Tell whether a quota counts an instance: until some time after it was told to end."""
    if node.instance.state in (*LIVE, "shutting-down"):
        return True
    ended_at = node.billed[-1][1] if node.billed else None
    return ended_at is not None and time.time() - ended_at < late_s


def _make_image(self: Any, instance_id: str, *given: Any, **named: Any) -> Ami:
    """CreateImage: the node goes on meanwhile, which EC2 asks for by `--no-reboot`."""
    image = _create_image(self, instance_id, *given, **named)
    nodes[instance_id].copy_disk(settings.IMAGES / image.id)
    journal.note(f"{image.id} made of {instance_id}")
    return image


def _boot_again(self: Instance) -> Any:
    with lock:
        previous = _start(self)
        nodes[self.id].boot()
        return previous


def _ended_by(original: Callable[[Instance], Any], during: str) -> Callable[[Instance], Any]:
    def method(self: Instance) -> Any:
        with lock:
            if self.state in ("terminated", "shutting-down"):
                return type(self._state)(self.state, STATES[self.state])
            previous = original(self)
            node = nodes.get(self.id)
            if node is not None and node.alive:
                node.stop_billing()
                set_state(self, during)
                node.shut_down()
            return previous

    return method


def _furnish(region: str) -> None:
    """Give the default VPC its internet gateway: moto's has none, and SkyPilot looks for it."""
    backend = ec2_backends[settings.ACCOUNT][region]
    gateway = backend.create_internet_gateway()
    backend.attach_internet_gateway(gateway.id, backend.default_vpc.id)
    for table in backend.route_tables.values():
        if table.vpc_id == backend.default_vpc.id:
            backend.create_route(table.id, "0.0.0.0/0", gateway_id=gateway.id)


def _make_role() -> None:
    """Make what SkyPilot makes at its first launch, pausing twice for 15 s: the nodes' role."""
    backend = iam_backends[settings.ACCOUNT]["aws"]
    principal = {"Service": "ec2.amazonaws.com"}
    statement = {"Effect": "Allow", "Principal": principal, "Action": "sts:AssumeRole"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    backend.create_role(settings.ROLE, policy, "/", None, "", [], "3600")
    backend.create_instance_profile(settings.ROLE, "/", [])
    backend.add_role_to_instance_profile(settings.ROLE, settings.ROLE)


# ---------------------------------------------------------------- blows


def interrupt(node: Node, seconds: float, *, warn: bool = True) -> None:
    """Announce a spot interruption and carry it out when its time has come; returns at once."""
    if warn:
        state = node.told()
        state["deadline"] = int(time.time() + seconds)
        state.setdefault("rebalance", int(time.time()))
        node.tell(state)
        journal.note(f"{node.id} spot interruption in {seconds:g} s announced")
    after = threading.Timer(seconds, _take, args=(node,))
    after.daemon = True
    after.start()


def _take(node: Node) -> None:
    with lock:
        if node.alive and node.instance.state == "running":
            node.instance.terminate()
            node.instance._reason = _SPOT_ENDED  # no time in it: the spot request tells that
            node.instance.state_reason.code = _SPOT_ENDED
            node.instance.state_reason.message = f"{_SPOT_ENDED}: Spot instance termination"


def crash(node: Node) -> None:
    """Let the hardware fail: no notice, no shutdown."""
    with lock:
        node.stop_billing()
        _terminate(node.instance)
        node.instance._reason = "Server.InternalError"
        set_state(node.instance, "shutting-down", "Server.InternalError")
        node.kill()


def change_price(zone: str, usd: float, kind: str | None, notice_s: float) -> list[str]:
    """Let the spot price of a zone change; who offers less (by default on-demand's) is taken."""
    kinds = prices.change(zone, usd, kind)
    taken = []
    for node in list(nodes.values()):
        instance = node.instance
        here = instance.placement.zone == zone and instance.instance_type in kinds
        if not (here and node.alive and instance.state in LIVE and market_of(instance) == "spot"):
            continue
        limit = prices.on_demand_usd_per_h(instance.instance_type, zone)
        if limit is not None and usd > limit:
            interrupt(node, notice_s)
            taken.append(node.id)
    journal.note(f"spot in {zone} costs {usd:.4f} from now on: {' '.join(kinds)}")
    return taken
