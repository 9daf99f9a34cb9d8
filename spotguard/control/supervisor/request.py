"""What the launcher is asked for one attempt, and what the job learns of it."""

from __future__ import annotations

import json
import logging
import socket
from dataclasses import asdict
from typing import TYPE_CHECKING

from spotguard.control.journal.fold import allotment_to_json
from spotguard.control.journal.nodes.offer import offer_to_json
from spotguard.control.journal.stored.code import in_copy, local_variables
from spotguard.errors import AlreadyExists
from spotguard.events import env, keys
from spotguard.events.states import EndReason
from spotguard.launch.base import LaunchRequest
from spotguard.shared.cache_folders import COMPILED
from spotguard.spec.infra import LOCAL, gpu_count
from spotguard.storage.urls import is_folder

if TYPE_CHECKING:
    from spotguard.control.journal.record import AttemptRecord, RunRecord
    from spotguard.launch.base import Offer
    from spotguard.shared.hazard import HazardByAge
    from spotguard.spec.model import JobSpec
    from spotguard.storage.base import ObjectStore

log = logging.getLogger(__name__)

BUCKET_HEARTBEAT_S = 10.0
"""4 US cents a day and node; every second it would be 43 (S3's price of a PUT, 2026)."""


_NODES_OUTLIVE_EACH_OTHER = frozenset({LOCAL})
"""SkyPilot ends a job on all nodes with the first one that fails or is gone (`get_or_fail` in its
`task_codegen.py`); on Slurm the allocation itself ends."""


def may_go_on_in_place(record: RunRecord, attempt: AttemptRecord) -> bool:
    """Tell whether nodes that stay may begin the next attempt themselves when others leave."""
    wanted = record.spec.get("in_place", True) and attempt.offer.infra in _NODES_OUTLIVE_EACH_OTHER
    return bool(wanted) and attempt.nodes > record.limits.nodes_min


def cluster_name(run_id: str, attempt: int, refused: int = 0) -> str:
    """Return the name of an attempt's cluster; never reused, also not after so many refusals."""
    return f"{run_id}-{attempt}r{refused}" if refused else f"{run_id}-{attempt}"


def launch_request(
    record: RunRecord,
    attempt: AttemptRecord,
    spec: JobSpec,
    *,
    now: float,
    hazard: HazardByAge | None = None,
) -> LaunchRequest:
    """Return the request for an intended attempt: the same each time it is asked for.

    `hazard` is how often nodes are taken there, by which the job plans its saves.
    Only its lifetime is what is left of it now: an attempt that is launched late ends no later.
    Its code is the run's own copy, whatever became of the user's folder.

    Raises:
        EnvironmentFailure: that copy is not on this machine.
    """
    down_at = attempt.allotment.down_at
    spec = in_copy(spec, record.code)
    on_this_machine = attempt.offer.infra == LOCAL
    code = local_variables(record.code, spec) if on_this_machine else {}
    return LaunchRequest(
        cluster=attempt.cluster,
        run_id=record.run_id,
        attempt=attempt.number,
        nodes=attempt.nodes,
        nproc_per_node=_processes(spec, attempt.offer),
        script=spec.script,
        args=tuple(spec.args),
        workdir=spec.workdir,
        env={**spec.env, **_job_env(record, attempt, spec, hazard), **code},
        offer=attempt.offer,
        max_lifetime_s=None if down_at is None else max(1.0, down_at - now),
    )


def _processes(spec: JobSpec, offer: Offer) -> int:
    """Return the processes of a node: one for each GPU of what was had, unless told otherwise."""
    told = spec.nproc_per_node != gpu_count(spec.gpus)
    return spec.nproc_per_node if told or not offer.gpus else gpu_count(offer.gpus)


def claim_data(attempt: AttemptRecord) -> dict[str, object]:
    """Return what the attempt's claim says of its place: enough to rebuild a lost journal."""
    return {
        **offer_to_json(attempt.offer),
        "nodes": attempt.nodes,
        "cluster": attempt.cluster,
        "intended_at": attempt.intended_at,
        "controller_host": socket.gethostname(),
    }


def launch_data(record: RunRecord, attempt: AttemptRecord) -> dict[str, object]:
    """Return what is published of a launch, for the nodes and for who rebuilds a lost journal."""
    return {
        **claim_data(attempt),
        "lost_launches": [asdict(each) for each in record.lost_launches],
        "after": after(record, attempt),  # else it seems to have ended the one before
        "allotment": allotment_to_json(attempt.allotment),
    }


_KNOWN_TO_ALL = {EndReason.MOVED: EndReason.RESIZED}
"""For nodes whose spotguard is older than the controller's: a word that they do not know would be
the user's stop to them, after which nobody goes on."""


def ask_to_stop(store: ObjectStore, attempt: int, reason: EndReason) -> None:
    """Have an attempt save and stop; the first one who asks says why.

    Raises:
        StoreError: it cannot be asked.
    """
    known = _KNOWN_TO_ALL.get(reason, reason)
    body = {
        "reason": known.value,
        "exact_reason": reason.value,
        "message": f"asked to stop: {reason.told(None)}",
    }
    try:
        store.put(keys.stop(attempt), json.dumps(body).encode(), if_absent=True)
    except AlreadyExists:
        log.info("attempt %s has been asked to stop before", attempt)


def _job_env(
    record: RunRecord, attempt: AttemptRecord, spec: JobSpec, hazard: HazardByAge | None
) -> dict[str, str]:
    down_at = attempt.allotment.down_at
    variables: dict[str, object] = {
        env.RUN_ID: record.run_id,
        env.ATTEMPT: attempt.number,
        env.AFTER: after(record, attempt),
        env.STORE: record.store_root,
        env.CLAIM: json.dumps(claim_data(attempt), sort_keys=True),
        env.SAVE_EVERY: _unless_default(spec, "save_every"),
        env.STORE_PATIENCE: _unless_default(spec, "store_patience_s"),
        env.HAZARD: None if hazard is None else hazard.written(),
        env.KEEP_LAST: _unless_default(spec, "keep_last"),
        env.HEARTBEAT_S: heartbeat_s(spec),
        env.SEED: spec.seed,
        env.CACHE: _cache(spec),
        env.NODES_MIN: record.limits.nodes_min if may_go_on_in_place(record, attempt) else None,
        env.SECRETS: ",".join(sorted(spec.env)) or None,
        env.CLOCK: keys.launch(attempt.number),
        env.UNTIL_STEP: record.until_step,
        env.BUDGET_STOP_AT: attempt.allotment.budget_stop_at,
        env.DEADLINE_STOP_AT: attempt.allotment.deadline_stop_at,
        env.DOWN_AT: down_at,
    }
    return {name: str(value) for name, value in variables.items() if value is not None}


def _cache(spec: JobSpec) -> str | None:
    """Return which folders nodes keep in the run store; None if none."""
    folders = [*spec.cache, *([COMPILED] if spec.cache_compiled else [])]
    if not folders:
        return None
    return json.dumps({"folders": folders, "most_bytes": spec.cache_limit_gb * 10**9})


def after(record: RunRecord, attempt: AttemptRecord) -> int | None:
    """Return which attempt this one waits for; None for one that may begin at once."""
    is_ahead = record.ahead is not None and record.ahead.number == attempt.number
    return record.current.number if is_ahead and record.current is not None else None


def heartbeat_s(spec: JobSpec) -> float:
    """Return how often nodes show that they live: to a bucket less often, for it costs money."""
    if is_folder(spec.store) or spec.heartbeat_s != type(spec).model_fields["heartbeat_s"].default:
        return spec.heartbeat_s
    return BUCKET_HEARTBEAT_S


def _unless_default(spec: JobSpec, field: str) -> object:
    """Return the setting if it was changed: a default must not beat what the script says."""
    value = getattr(spec, field)
    return None if value == type(spec).model_fields[field].default else value
