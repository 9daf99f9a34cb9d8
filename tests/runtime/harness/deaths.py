"""Lives one attempt again and again, and dies at the next step of its folder store each time.

Run as a module with a folder; prints how many deaths it survived. A process of its own, because
it forks: what `os._exit` leaves behind is what a killed process leaves behind.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import traceback
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spotguard.checkpoint.lineage import CheckpointRef
from spotguard.checkpoint.manifest import check_shards_intact, load_manifest
from spotguard.events import keys
from spotguard.events.states import CheckpointKind
from spotguard.storage import FileStore
from spotguard.storage.filesystem import fsync as durable
from tests.runtime.harness.lab import Rank, next_attempt, raw

if TYPE_CHECKING:
    from spotguard.storage.base import ObjectStore

KINDS = {
    40: CheckpointKind.PERIODIC,
    50: CheckpointKind.EMERGENCY,
    60: CheckpointKind.FINAL,
}
_CHANGES = {"os.link", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}
_DIED = 9


def state(step: int) -> dict[str, Any]:
    """Return a state that no other step has in common with this one."""
    bits = torch.Generator().manual_seed(step)
    return {"weight": torch.randint(0, 256, (3000,), dtype=torch.uint8, generator=bits), "n": step}


def live(store: ObjectStore, *, tell: Any = lambda step: None) -> None:
    """Go on from what is there, as attempt 2: saves of all kinds, pruning after each."""
    rank = Rank(store, attempt=2)
    rank.start(s={})
    for step, kind in KINDS.items():
        if kind is CheckpointKind.PERIODIC:
            rank.later(step, s=state(step))
            rank.saver.wait()
        else:
            rank.now(step, kind, s=state(step))
        if rank.saver.last is not None and rank.saver.last.step == step:
            tell(step)


def begin(store: ObjectStore) -> None:
    """Live attempt 1: there are checkpoints at 20 and 30, and 10 was pruned."""
    rank = Rank(store)
    rank.start()
    for step in (10, 20, 30):
        rank.now(step, s=state(step))


def check(store: ObjectStore, told: list[int]) -> int:
    """Check that the newest committed state comes back bit by bit; return its step.

    `told` are the steps whose saves returned before death; one more may be committed.
    """
    committed = [
        ref
        for folder in store.list_folders(keys.CHECKPOINTS)
        if (ref := CheckpointRef.of(folder)) and store.head(keys.manifest(folder))
    ]
    for ref in committed:  # also the older ones, and those that were being pruned
        check_shards_intact(store, load_manifest(store, ref.prefix))
    newest = max(ref.step for ref in committed)
    steps = [30, *KINDS]
    certain = told[-1] if told else 30
    assert newest in (certain, *steps[steps.index(certain) + 1 :][:1]), (newest, told)
    found: dict[str, Any] = {}
    restored = next_attempt(store, s=found)
    assert restored.skipped == []
    assert found["n"] == newest, (found["n"], newest)
    assert raw(found["weight"]) == raw(state(newest)["weight"])
    return newest


def go_on(store: ObjectStore) -> None:
    """Save and prune as the attempt after: only the last two and what is final are left."""
    had_final = store.head(keys.manifest(keys.checkpoint(60, 2))) is not None
    rank = Rank(store, attempt=4)
    rank.start(s={})
    for step in (80, 90, 100):
        rank.now(step, s=state(step))
    kept = [keys.checkpoint(60, 2)] * had_final + [keys.checkpoint(step, 4) for step in (90, 100)]
    assert list(store.list_folders(keys.CHECKPOINTS)) == kept


class Death:
    """Comes at the `n`-th step that changes something below `root`, before it takes effect."""

    def __init__(self, n: int, root: Path) -> None:
        self._left = n
        self._root = str(root)
        self._fsync = os.fsync
        os.fsync = self._sync  # type: ignore[assignment]  # files are synced by descriptor
        sys.addaudithook(self._look)

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (writes or event in _CHANGES) and any(self._is_ours(each) for each in args):
            self._step()

    def _is_ours(self, path: object) -> bool:
        """Also of names alone: the store opens what lies in its folders by those."""
        name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        return name.startswith(self._root) or bool(name and not name.startswith("/"))

    def _sync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and self._left == 1:
            os.ftruncate(descriptor, status.st_size // 2)  # a power cut: half of it got there
        self._step()
        self._step()
        self._fsync(descriptor)
        self._step()

    def _step(self) -> None:
        self._left -= 1
        if not self._left:
            os._exit(_DIED)


def die_at(n: int, root: Path) -> tuple[int, list[int]]:
    """Return the exit code of a life that dies at step `n`, and what it told to be saved."""
    hear, say = os.pipe()
    child = os.fork()
    if not child:
        try:
            Death(n, root)
            live(FileStore(root), tell=lambda step: os.write(say, bytes([step])))
        except BaseException:  # noqa: BLE001 - it must not return into the parent's code
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(say)
    with os.fdopen(hear, "rb") as pipe:
        told = list(pipe.read())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), told


def main(folder: Path, large_bytes: int, stride: int) -> None:
    """Die at every step in turn, or at every few."""
    assert durable._LARGE_BYTES
    durable._LARGE_BYTES = large_bytes
    begin(FileStore(folder / "first"))
    newest = []
    for n in count(1, stride):
        root = folder / "now"
        shutil.copytree(folder / "first", root)
        code, told = die_at(n, root)
        assert code in (0, _DIED), code
        newest.append(check(FileStore(root), told))
        if n % 5 == 1 or not code:
            go_on(FileStore(root))
        shutil.rmtree(root)
        if not code:
            break
    assert newest == sorted(newest)
    assert set(newest) == {30, *KINDS}
    print(n)  # noqa: T201 - to the test


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
