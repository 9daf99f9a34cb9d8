"""spotguard's own saves and restores, as the runtime makes them: the one place that knows how."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from benchmarks.checkpoint.method import Method, Pending
from spotguard.checkpoint.lineage import claim_attempt
from spotguard.checkpoint.retention import Retention
from spotguard.events import keys
from spotguard.events.states import CheckpointKind
from spotguard.runtime.checkpoint import restore as restoring
from spotguard.runtime.checkpoint.saver import Saver
from spotguard.runtime.distributed.rendezvous import Alone
from spotguard.runtime.state.tracked import Tracked, tracked
from spotguard.storage import FileStore

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.checkpoint.state import TrainingState
    from spotguard.errors import SpotguardError
    from spotguard.runtime.checkpoint.captured import Capture, Saved


class _Spotguard(Method):
    """What both kinds of save share: a store in a folder, and one saver that stays warm."""

    format = "spotguard"

    def __init__(self, folder: Path, state: TrainingState) -> None:
        super().__init__(folder, state)
        self._store = FileStore(folder)
        self._objects = _tracked(state)
        self._durable: Future[float] = Future()
        self._saver = Saver(
            self._store,
            run_id="benchmark",
            attempt=1,
            rank=0,
            world_size=1,
            coordinator=Alone(),
            retention=Retention(keep_last=2),
            save_random=True,
            on_saved=self._on_saved,
            on_failed=self._on_failed,
        )
        claim_attempt(self._store, 1, None)

    def load(self, number: int, target: TrainingState) -> None:
        """Choose the newest valid checkpoint, prove it, and restore it."""
        restoring.restore(self._store, Alone(), 0, 1, _tracked(target))

    def files(self) -> list[Path]:
        """Return the files of all checkpoints, without the claim."""
        return [path for path in super().files() if keys.CHECKPOINTS.strip("/") in path.parts]

    def clear(self) -> None:
        """Remove all checkpoints; the claim stays."""
        self._saver.wait()
        for info in list(self._store.list(keys.CHECKPOINTS)):
            self._store.delete(info.key)

    def close(self) -> None:
        """Let the save in flight finish."""
        self._saver.wait()

    def _capture(self, number: int, kind: CheckpointKind) -> Capture:
        self._durable = Future()
        return self._saver.capture(number, kind, self._objects, {"train_s": 0.0})

    def _on_saved(self, _: Saved, __: dict[str, Any]) -> None:
        self._durable.set_result(time.perf_counter())

    def _on_failed(self, _: int, problem: SpotguardError) -> None:
        self._durable.set_exception(problem)


class Periodic(_Spotguard):
    """The periodic save: training goes on."""

    name = "spotguard periodic"
    background = True

    def save(self, number: int) -> Pending:
        """Begin the save; an optimizer step waits for what is left of the copy."""
        self._saver.save_in_background(self._capture(number, CheckpointKind.PERIODIC), overlap=True)
        return Pending(durable=self._durable, wait_until_free=self._saver.wait_copied)


class Emergency(_Spotguard):
    """The emergency save: training has stopped, the live tensors are written as they are."""

    name = "spotguard emergency"
    note = "training has stopped; straight from the live tensors"

    def save(self, number: int) -> Pending:
        """Save and commit before returning."""
        self._saver.save_now(self._capture(number, CheckpointKind.EMERGENCY))
        return Pending(durable=self._durable)


def _tracked(state: TrainingState) -> dict[str, Tracked]:
    return {
        "model": tracked("model", state.model),
        "optimizer": tracked("optimizer", state.optimizer),
    }


OURS: tuple[type[Method], ...] = (Periodic, Emergency)
