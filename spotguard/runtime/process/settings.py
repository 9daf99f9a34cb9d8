"""What a job is told by its environment, by `init`'s arguments, or by nobody (plain `python`)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotguard.checkpoint.retention import LEAST_KEPT
from spotguard.errors import UsageError
from spotguard.events import env, keys
from spotguard.runtime.process.failed_saves import PATIENCE_S
from spotguard.shared.hazard import HazardByAge
from spotguard.shared.units import parse_duration_s


@dataclass(frozen=True, kw_only=True)
class SaveEvery:
    """When to save: every `steps`, or every `seconds`, or (neither) by measured cost and risk."""

    steps: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, text: str) -> SaveEvery:
        """Return the policy for `auto`, `30s` or `100 steps`.

        Raises:
            UsageError: it is none of these.
        """
        if text.strip().lower() == "auto":
            return cls()
        match = re.fullmatch(r"\s*(\d+)\s*steps?\s*", text)
        if match and int(match[1]):
            return cls(steps=int(match[1]))
        try:
            seconds = parse_duration_s(text)
        except ValueError:
            seconds = 0.0
        if seconds <= 0:
            raise UsageError(f"save_every: given {text!r}; allowed: auto, 30s, or 100 steps")
        return cls(seconds=seconds)


def parse_peer_timeout_s(text: str) -> float | None:
    """Return the seconds of a duration, None for `off`.

    Raises:
        UsageError: it is neither.
    """
    if text.strip().lower() == "off":
        return None
    try:
        seconds = parse_duration_s(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise UsageError(f"peer_timeout: given {text!r}; allowed: a duration (10s), or off")
    return seconds


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything the runtime needs to know before it starts."""

    run_id: str | None
    attempt: int | None
    """None: the next free one."""
    after: int | None = None
    """The attempt whose end this one waits for before it restores; None: none."""
    store_url: str
    rank: int
    world_size: int
    local_rank: int
    node: int
    launched: bool
    """True under `spotguard up`."""
    claim: dict[str, Any] = field(default_factory=dict)
    nodes_may_change: bool = False
    """True where the run may go on with fewer nodes in place."""
    metadata: str = "none"
    notice_file: str | None = None
    leaving_file: str | None = None
    local_copy: str | None = None
    saving_file: str | None = None
    """Held locked while this rank saves, so that others on its node upload nothing meanwhile."""
    rank_file: str | None = None
    """Held locked as long as this process lives, which need not be the first of its rank."""
    grace_s: float = 30.0
    budget_stop_at: float | None = None
    deadline_stop_at: float | None = None
    until_step: int | None = None
    """Steps done at which the run's phase ends; None: it ends with the run."""
    node_up_at: float | None = None
    clock_key: str | None = None
    """What the controller wrote at the launch, by whose clock the run lives."""
    save_every: SaveEvery = field(default_factory=SaveEvery)
    hazard: HazardByAge = field(default_factory=HazardByAge)
    """How often nodes are taken in this place, by their age."""
    keep_last: int = 3
    heartbeat_s: float = 5.0
    peer_timeout_s: float | None = 10.0
    store_patience_s: float = PATIENCE_S
    """How long the store may be away before the job ends for it."""
    """None: ranks that vanish are not looked for."""
    seed: int = 0
    progress_path: str | None = None
    trace_path: str | None = None
    probe_path: str | None = None
    max_steps: int | None = None
    smoke_samples: int | None = None
    """In a smoke, the most samples of a step; 0: as many as the script says. None elsewhere."""
    try_loader_path: str | None = None
    """Where to write how fast the loader reads; the process ends then. None: it is not timed."""
    try_batch: str | None = None
    """How sizes of micro-batches are to be tried, instead of training; None: they are not."""
    holds: dict[int, float] = field(default_factory=dict)
    """Steps done -> seconds to wait there for a stop, so that a drill hits fast scripts too."""

    def make_default_store(self) -> None:
        """Make the folder that runs lie in where none is named, for nobody else to enter.

        One that exists is as open as its owner left it.
        """
        folder = _default_store()
        if self.store_url == str(folder):
            with contextlib.suppress(OSError):  # who cannot write there is told by the store itself
                folder.mkdir(mode=0o700)

    @classmethod
    def from_environment(
        cls,
        *,
        run_id: str | None,
        store: str | None,
        seed: int | None,
        save_every: str | None,
        keep_last: int | None,
        peer_timeout: str | None,
    ) -> Settings:
        """Return the settings; the environment of a launcher wins over the script's arguments.

        So the command line can change what a script has built in, without an edit.
        """
        rank, world_size = _rank_of_world()
        chosen_id = os.environ.get(env.RUN_ID) or run_id
        if chosen_id is not None and not keys.RUN_ID_PATTERN.fullmatch(chosen_id):
            raise UsageError(
                f"run_id: given {chosen_id!r}; allowed are lower-case letters, digits and dashes"
            )
        return cls(
            run_id=chosen_id,
            attempt=_int(env.ATTEMPT),
            after=_int(env.AFTER),
            store_url=os.environ.get(env.STORE) or store or str(_default_store()),
            rank=rank,
            world_size=world_size,
            local_rank=_int("LOCAL_RANK") or 0,
            node=_int(env.NODE) or _int("GROUP_RANK") or 0,
            launched=env.ATTEMPT in os.environ,
            claim=_claim(os.environ.get(env.CLAIM) or "{}"),
            nodes_may_change=bool(os.environ.get(env.NODES_MIN)),
            metadata=os.environ.get(env.METADATA, "none"),
            notice_file=os.environ.get(env.NOTICE_FILE),
            leaving_file=os.environ.get(env.LEAVING),
            local_copy=os.environ.get(env.LOCAL_COPY) or None,
            saving_file=os.environ.get(env.SAVING) or None,
            rank_file=os.environ.get(env.RANK_FILE) or None,
            grace_s=_float(env.GRACE_S) or 30.0,
            budget_stop_at=_float(env.BUDGET_STOP_AT),
            deadline_stop_at=_float(env.DEADLINE_STOP_AT),
            until_step=_int(env.UNTIL_STEP),
            node_up_at=_float(env.NODE_UP_AT),
            clock_key=os.environ.get(env.CLOCK) or None,
            save_every=SaveEvery.parse(os.environ.get(env.SAVE_EVERY) or save_every or "auto"),
            hazard=_hazard(os.environ.get(env.HAZARD, "")),
            keep_last=_keep_last(keep_last),
            heartbeat_s=_float(env.HEARTBEAT_S) or 5.0,
            peer_timeout_s=parse_peer_timeout_s(
                os.environ.get(env.PEER_TIMEOUT) or peer_timeout or "10s"
            ),
            store_patience_s=_seconds(env.STORE_PATIENCE, PATIENCE_S),
            seed=next(s for s in (_int(env.SEED), seed, 0) if s is not None),
            progress_path=os.environ.get(env.PROGRESS),
            trace_path=os.environ.get(env.TRACE_SAMPLES),
            probe_path=os.environ.get(env.PROBE),
            max_steps=_int(env.MAX_STEPS),
            smoke_samples=_int(env.SMOKE),
            try_loader_path=os.environ.get(env.TRY_LOADER) or None,
            try_batch=os.environ.get(env.TRY_BATCH) or None,
            holds=_holds(os.environ.get(env.HOLD, "")),
        )


def fresh_run_id() -> str:
    """Return a new run id for a script that nobody launched: its name, the time, some chance."""
    script = Path(sys.argv[0] or "job").stem.lower()
    name = re.sub(r"[^a-z0-9]+", "-", script).strip("-")[:30] or "job"
    return f"{name}-{time.strftime('%y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


def _default_store() -> Path:
    return Path.cwd() / "spotguard-runs"


def _rank_of_world() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, as torchrun or the like set them."""
    given = _int("WORLD_SIZE")
    world_size, rank = 1 if given is None else given, _int("RANK") or 0
    hint = "start several ranks with torchrun or spotguard up, one with plain python"
    if world_size < 1:
        raise UsageError(f"WORLD_SIZE: given {world_size}, but there is 1 rank at least", hint=hint)
    if not 0 <= rank < world_size:
        raise UsageError(
            f"RANK: given {rank}, but must be below WORLD_SIZE, {world_size}", hint=hint
        )
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if world_size > 1 else ():
        if not os.environ.get(name):
            raise UsageError(f"{name}: not set, but WORLD_SIZE is {world_size}", hint=hint)
    if world_size > 1:
        _int("MASTER_PORT")
    return rank, world_size


def _holds(text: str) -> dict[int, float]:
    pairs = (item.partition(":") for item in text.split(",") if item)
    try:
        return {int(step): float(seconds) for step, _, seconds in pairs}
    except ValueError:
        raise UsageError(f"{env.HOLD}: given {text!r}, but must be STEP:SECONDS,...") from None


def _hazard(text: str) -> HazardByAge:
    try:
        return HazardByAge.parse(text)
    except ValueError:
        raise UsageError(f"{env.HAZARD}: given {text!r}, but must be AGE_S:PER_HOUR,...") from None


def _keep_last(given: int | None) -> int:
    count = next(n for n in (_int(env.KEEP_LAST), given, 3) if n is not None)
    if count < LEAST_KEPT:
        raise UsageError(
            f"keep_last: given {count}, but at least {LEAST_KEPT} checkpoints must be kept"
        )
    return count


def _claim(text: str) -> dict[str, Any]:
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError):
        raise UsageError(f"{env.CLAIM}: given {text!r}, but must be a JSON object") from None


def _int(name: str) -> int | None:
    text = os.environ.get(name)
    try:
        return int(text) if text else None
    except ValueError:
        raise UsageError(f"{name}: given {text!r}, but must be a whole number") from None


def _seconds(name: str, usual_s: float) -> float:
    given = _float(name)
    return usual_s if given is None else given


def _float(name: str) -> float | None:
    text = os.environ.get(name)
    try:
        return float(text) if text else None
    except ValueError:
        raise UsageError(f"{name}: given {text!r}, but must be a number") from None
