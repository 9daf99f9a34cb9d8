"""What the nodes of a run are made of, as its job asks for them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.plan.carbon.estimate import NodeDevices, machine
from spotguard.spec.infra import LOCAL

if TYPE_CHECKING:
    from spotguard.control.journal.record import AttemptRecord, RunRecord


def machine_of(record: RunRecord, attempt: AttemptRecord | None = None) -> NodeDevices:
    """Return what a node of an attempt is made of; without one, of what the job asks for now.

    Attempts of another place than the run is in now were of what their own offer says.
    """
    spec = record.spec
    node = spec.get("node")
    gpus = _text(spec.get("gpus"))
    infra = spec.get("infra")
    if attempt is not None:
        here = attempt in record.of_this_place
        gpus = attempt.offer.gpus or (gpus if here else None)
        infra = attempt.offer.infra
    return machine(
        gpus,
        _text(node.get("cpus")) if isinstance(node, dict) else None,
        processes=spec["nproc_per_node"] if isinstance(spec.get("nproc_per_node"), int) else 1,
        is_local=infra == LOCAL,
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
