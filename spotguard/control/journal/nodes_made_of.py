"""What the nodes of a run are made of, as its job asks for them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.plan.carbon.estimate import NodeDevices, machine
from spotguard.spec.infra import LOCAL

if TYPE_CHECKING:
    from spotguard.control.journal.record import RunRecord


def machine_of(record: RunRecord) -> NodeDevices:
    """Return what a node of the run is made of, as its job asks for it."""
    spec = record.spec
    node = spec.get("node")
    return machine(
        _text(spec.get("gpus")),
        _text(node.get("cpus")) if isinstance(node, dict) else None,
        processes=spec["nproc_per_node"] if isinstance(spec.get("nproc_per_node"), int) else 1,
        is_local=spec.get("infra") == LOCAL,
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
