"""The `SPOTGUARD_*` variables by which a launcher tells a job what it is part of.

Every variable is optional: without any, the runtime works alone (`python job.py`).
"""

from __future__ import annotations

from typing import Final

RUN_ID: Final = "SPOTGUARD_RUN_ID"
ATTEMPT: Final = "SPOTGUARD_ATTEMPT"
"""Attempt number, from 1; the generation that fences writers."""
STORE: Final = "SPOTGUARD_STORE"
"""URL or path of the store; the run lives below it at `<store>/<run_id>/`."""
NODE: Final = "SPOTGUARD_NODE"
"""Index of this node in its cluster, from 0."""
NODES_MIN: Final = "SPOTGUARD_NODES_MIN"
"""The fewest nodes on which the run may go on in place when others leave. Not set: it may not."""
LEAVING: Final = "SPOTGUARD_LEAVING"
"""A file that the job makes when this node is to be taken: it does not go on in place."""
CLUSTER: Final = "SPOTGUARD_CLUSTER"
"""Name of the cluster; also how stray processes of a dead cluster are found."""
CLAIM: Final = "SPOTGUARD_CLAIM"
"""JSON object merged into the attempt's claim: place, price, nodes."""
METADATA: Final = "SPOTGUARD_METADATA"
"""`aws`, `gcp`, `azure` or `none`, optionally `=http://host:port`: whose notices to poll."""
NOTICE_FILE: Final = "SPOTGUARD_NOTICE_FILE"
"""A file whose appearing is a notice; it may hold JSON `{"deadline_at": ISO 8601}`."""
LOCAL_COPY: Final = "SPOTGUARD_LOCAL_COPY"
"""Folder on the node's own disk for a copy of the newest shards; a restore reads it first."""
GRACE_S: Final = "SPOTGUARD_GRACE_S"
"""Seconds between SIGTERM and SIGKILL in this place; default 30."""
BUDGET_STOP_AT: Final = "SPOTGUARD_BUDGET_STOP_AT"
"""Epoch seconds at which the job must save and stop because its allotted money is used up."""
DEADLINE_STOP_AT: Final = "SPOTGUARD_DEADLINE_STOP_AT"
"""Epoch seconds at which the job must save and stop because the run's deadline comes."""
SAVE_EVERY: Final = "SPOTGUARD_SAVE_EVERY"
"""`auto`, a duration (`30s`), or `N steps`."""
KEEP_LAST: Final = "SPOTGUARD_KEEP_LAST"
"""How many checkpoints retention keeps (at least 2)."""
HEARTBEAT_S: Final = "SPOTGUARD_HEARTBEAT_S"
"""Seconds between heartbeats and between looks at `stop.json`."""
PEER_TIMEOUT: Final = "SPOTGUARD_PEER_TIMEOUT"
"""Duration (`10s`) in which all ranks leave after another one's machine vanished, or `off`."""
SEED: Final = "SPOTGUARD_SEED"
"""Seed of sample order and randomness, when the script gives none."""
PROGRESS: Final = "SPOTGUARD_PROGRESS"
"""A 16-byte file that the node's first rank maps and writes each step: step, total (int64 LE)."""
TRACE_SAMPLES: Final = "SPOTGUARD_TRACE_SAMPLES"
"""Path of a JSON Lines file: which sample ids each rank trained on at each step."""
PROBE: Final = "SPOTGUARD_PROBE"
"""Path of a JSON Lines file of per-step fingerprints; set by `spotguard drill`."""
MAX_STEPS: Final = "SPOTGUARD_MAX_STEPS"
"""Cap on the steps of the loop, below the script's own total; set by `spotguard drill`."""
HOLD: Final = "SPOTGUARD_HOLD"
"""`STEP:SECONDS,...`: steps before which the loop waits to be stopped; set by `spotguard drill`."""

JOB_VARIABLES: Final = frozenset(
    value for name, value in list(globals().items()) if name.isupper() and isinstance(value, str)
)
"""All of the above; anything that checks `SPOTGUARD_*` for typos must let these pass."""
