"""Saves and restores without processes, for the tests of this folder."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from spotguard.checkpoint.lineage import claim_attempt, highest_claim
from spotguard.checkpoint.retention import Retention
from spotguard.events.states import CheckpointKind
from spotguard.runtime.checkpoint import restore as restoring
from spotguard.runtime.checkpoint.saver import Saver
from spotguard.runtime.distributed.rendezvous import Alone
from spotguard.runtime.state.tracked import Tracked, TrackedValue, tracked
from spotguard.testing import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from spotguard.errors import SpotguardError
    from spotguard.runtime.checkpoint.captured import Saved
    from spotguard.runtime.checkpoint.local_copy import LocalCopy
    from spotguard.runtime.distributed.rendezvous import Coordinator
    from spotguard.storage.base import ObjectStore


@dataclass
class Rank:
    """One rank's saver, and what it reported."""

    store: ObjectStore = field(default_factory=MemoryStore)
    rank: int = 0
    world_size: int = 1
    attempt: int = 1
    coordinator: Coordinator = field(default_factory=Alone)
    keep_last: int = 2
    save_random: bool = False
    local_copy: LocalCopy | None = None
    saved: list[Saved] = field(default_factory=list)
    failed: list[tuple[int, SpotguardError]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.saver = Saver(
            self.store,
            run_id="a-run",
            attempt=self.attempt,
            rank=self.rank,
            world_size=self.world_size,
            coordinator=self.coordinator,
            retention=Retention(keep_last=self.keep_last),
            save_random=self.save_random,
            local_copy=self.local_copy,
            on_saved=lambda saved, _: self.saved.append(saved),
            on_failed=lambda step, problem: self.failed.append((step, problem)),
        )

    def start(self, **objects: Any) -> restoring.Restored:
        """Restore into the objects and claim the attempt; return what was restored."""
        found = self.restore(adapters(objects))
        if self.rank == 0:
            claim_attempt(self.store, self.attempt, found.prefix)
        self.saver.parent = found.prefix
        return found

    def restore(self, objects: Mapping[str, Tracked], *, strict: bool = True) -> restoring.Restored:
        """Restore into the adapters of tracked objects."""
        return restoring.restore(
            self.store,
            self.coordinator,
            self.rank,
            self.world_size,
            objects,
            near=self.local_copy.store if self.local_copy else None,
            strict=strict,
        )

    def now(
        self, step: int, kind: CheckpointKind = CheckpointKind.PERIODIC, **objects: Any
    ) -> Saved | None:
        """Save the objects at once."""
        return self.saver.save_now(self.saver.capture(step, kind, adapters(objects), {}))

    def later(self, step: int, **objects: Any) -> None:
        """Begin a periodic save of the objects."""
        capture = self.saver.capture(step, CheckpointKind.PERIODIC, adapters(objects), {})
        self.saver.save_in_background(capture)


def adapters(objects: dict[str, Any]) -> dict[str, Tracked]:
    """Return the objects as `run.track` holds them."""
    return {name: tracked(name, value) for name, value in objects.items()}


def next_attempt(store: ObjectStore, **objects: Any) -> restoring.Restored:
    """Restore the newest checkpoint into the objects, as the next attempt would."""
    claim = highest_claim(store)
    return Rank(store, attempt=claim.attempt + 1 if claim else 1).start(**objects)


def through_a_checkpoint(value: Any) -> Any:
    """Return any storable value as it comes back from a checkpoint."""
    came: list[Any] = []
    rank = Rank()
    rank.start(x={})
    item = TrackedValue(None, lambda _: value, lambda _, state: came.append(state))
    rank.saver.save_now(rank.saver.capture(1, CheckpointKind.FINAL, {"x": item}, {}))
    rank.restore({"x": item})
    return came[0]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run each call in a thread; return their results, or the exceptions they raised."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as problem:  # noqa: BLE001 - it is the result
            results[index] = problem

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a rank hangs"
    return results


def same(one: Any, other: Any) -> bool:
    """Return whether two values agree in type and in every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(
            same(a, b) for a, b in zip(one.values(), other.values(), strict=True)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "tobytes"):
        return bool(
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    return repr(one) == repr(other) if isinstance(one, (float, complex)) else bool(one == other)


def raw(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes in row-major order."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
