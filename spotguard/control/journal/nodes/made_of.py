"""What the nodes of a run are made of, as its job asks for them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.policy.plan.carbon.estimate import NodeDevices, machine
from spotguard.spec.infra import LOCAL

if TYPE_CHECKING:
    from spotguard.control.journal.record import RunRecord
    from spotguard.launch.base import Offer


def machine_of(record: RunRecord, offer: Offer, *, here: bool = True) -> NodeDevices:
    """Return what a node of an offer is made of.

    `here`: it is of the place in which the run is now, so what the job asks for there counts.
    """
    spec = record.spec
    node = spec.get("node")
    return machine(
        offer.gpus or (_text(spec.get("gpus")) if here else None),
        _text(node.get("cpus")) if isinstance(node, dict) else None,
        processes=spec["nproc_per_node"] if isinstance(spec.get("nproc_per_node"), int) else 1,
        is_local=offer.infra == LOCAL,
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
