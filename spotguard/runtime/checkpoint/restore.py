"""Restoring: the newest valid checkpoint of the lineage into the tracked objects.

The first rank names a checkpoint; every rank reads what it needs of it, proves it, and says so.
If anything is damaged for anyone, all go on to the checkpoint before. Only when all have what they
need do the objects take their state.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from spotguard.checkpoint.lineage import restorable
from spotguard.checkpoint.manifest import check_shards_present, load_manifest
from spotguard.errors import (
    ArchivedCheckpoint,
    CheckpointError,
    DamagedCheckpoint,
    SpotguardError,
    StateMismatch,
)
from spotguard.events.states import CheckpointKind
from spotguard.runtime.checkpoint.own_state import BESIDE_RANDOM, PLACE
from spotguard.runtime.checkpoint.tensor_reader import StoredTensors
from spotguard.runtime.distributed.rank_parts import trees_of
from spotguard.runtime.distributed.rendezvous import LostContact
from spotguard.runtime.process.surroundings import without_collections
from spotguard.runtime.state.best import BestState
from spotguard.runtime.state.rng import restore_random_states
from spotguard.runtime.state.tracked import SAME_OBJECTS, base_files
from spotguard.runtime.state.tree import unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from spotguard.checkpoint.lineage import CheckpointRef
    from spotguard.checkpoint.manifest import Manifest
    from spotguard.checkpoint.tensors import ShardInfo
    from spotguard.runtime.distributed.rendezvous import Coordinator
    from spotguard.runtime.state.tracked import Finish, Tracked
    from spotguard.storage.base import ObjectStore

log = logging.getLogger("spotguard")

TIMEOUT_S = 1800.0
"""For the slowest rank to read its part."""
_GIVEN_UP = "!"


@dataclass(kw_only=True)
class Restored:
    """What was restored."""

    manifest: Manifest | None = None
    """None on a fresh start."""
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """(prefix, problem) of what was passed over, damaged or archived; the same on all ranks."""
    steps_back: int = 0
    """How many steps the newest, damaged checkpoint was further."""
    differences: list[str] = field(default_factory=list)
    """What did not fit and was left as the script made it."""
    bases: tuple[ShardInfo, ...] = ()
    """What no step had changed, which the checkpoint refers to: as it is in the objects now."""

    @property
    def prefix(self) -> str | None:
        """Return the checkpoint's prefix."""
        return self.manifest.prefix if self.manifest else None

    def tell(self, log: logging.Logger) -> None:
        """Say what was restored, and what was not, and why."""
        for prefix, problem in self.skipped:
            log.warning("passed over %s: %s", prefix, problem)
        for difference in self.differences:
            log.warning("restored in part: %s", difference)
        if self.manifest is not None:
            back = f", {self.steps_back} steps before the newest" if self.steps_back else ""
            log.info("resumed at step %d%s", self.manifest.step, back)


@without_collections()
def restore(
    store: ObjectStore,
    coordinator: Coordinator,
    rank: int,
    world_size: int,
    objects: Mapping[str, Tracked],
    *,
    check: Callable[[Manifest], None] = lambda manifest: None,
    near: ObjectStore | None = None,
    strict: bool = True,
) -> Restored:
    """Put the newest valid checkpoint of the history into `objects`, the same on every rank.

    `check` may refuse a checkpoint that does not fit the script. Data comes from the store `near`
    where it has a good copy. With `strict` off, what fits by name and shape is restored and the
    rest stays as the script made it. Blocks until every rank has what it needs; until then only
    tensors' contents have been changed.

    Raises:
        StateMismatch: the script tracks other objects than the checkpoint holds, or their names
            or shapes differ; nothing was changed.
        BaseNotFound: what it needs of a frozen base is in a file that is missing or has changed.
        DamagedCheckpoint: there are checkpoints, but none of them is whole.
        ArchivedCheckpoint: and some have to be brought back from the store's archive.
        StoreError: the store failed, which says nothing about the checkpoints.
        CheckpointError: another rank failed for such a reason.
    """
    choices = _Choices(store, coordinator, rank, world_size)
    restored = Restored()
    while (prefix := choices.next()) is not None:
        problem = ""
        finishers: list[Finish] = []
        try:
            manifest = choices.load(prefix)
            check(manifest)
            named = base_files(objects)
            tensors = StoredTensors(store, manifest, near=near, named=named, strict=strict)
            state = trees_of(manifest, rank, world_size, objects, tensors)
            finishers = _read(manifest, state, tensors, objects)
        except DamagedCheckpoint as damage:
            problem = damage.message
        except SpotguardError as other:
            choices.give_up(other)
            raise
        if choices.all_are_well(problem):
            for finish in finishers:
                finish()
            restored.manifest = manifest
            restored.differences = tensors.differences
            restored.bases = tensors.bases
            restored.skipped = choices.skipped
            restored.steps_back = choices.newest_step - manifest.step
            return restored
    if choices.skipped:
        raise _none_left(choices)
    return restored


def _none_left(choices: _Choices) -> DamagedCheckpoint:
    """Return the error for a run whose checkpoints are all passed over."""
    count, archived = len(choices.skipped), choices.archived
    if not archived:
        return DamagedCheckpoint(
            f"all {count} checkpoints of this run are damaged; the newest: {choices.skipped[0][1]}",
            hint="restore the store from a backup, or start a new run",
        )
    damaged = f", {count - len(archived)} damaged" if len(archived) < count else ""
    return ArchivedCheckpoint(
        f"no checkpoint of this run can be read now: {len(archived)} archived{damaged}; "
        f"the newest archived one is {archived[0]}",
        hint="bring its shards back (S3: aws s3api restore-object; Azure: az storage blob set-tier "
        "--tier Hot), which takes hours, then start again; docs/stores.md has the whole commands",
    )


class _Choices:
    """The checkpoints to try, newest first: the first rank names them and counts the votes."""

    def __init__(
        self, store: ObjectStore, coordinator: Coordinator, rank: int, world_size: int
    ) -> None:
        self._store = store
        self._coordinator = coordinator
        self._rank = rank
        self._world_size = world_size
        self._refs: Iterator[CheckpointRef] | None = None
        self._round = 0
        self._chosen: str | None = None
        self._manifest: Manifest | None = None
        self.skipped: list[tuple[str, str]] = []
        self.archived: list[str] = []
        """Those of the skipped that are whole, but have to be brought back."""
        self.newest_step = 0

    def next(self) -> str | None:
        """Return the prefix to try now; None if there is none left."""
        self._round += 1
        word = f"restore/{self._round}"
        if self._rank == 0:
            try:
                self._chosen = self._first_present()
            except SpotguardError as problem:
                self._coordinator.set(word, f"{_GIVEN_UP}{problem.message}")
                raise
            told = [self._chosen, self.newest_step, self.skipped, self.archived]
            self._coordinator.set(word, json.dumps(told))
        else:
            heard = json.loads(self._hear(word, 0))
            self._chosen, self.newest_step, skipped, self.archived = heard
            self.skipped = [(prefix, problem) for prefix, problem in skipped]
        return self._chosen

    def load(self, prefix: str) -> Manifest:
        """Return the manifest of what `next` returned."""
        return self._manifest or load_manifest(self._store, prefix)

    def all_are_well(self, problem: str) -> bool:
        """Say what this rank found wrong, if anything; return whether all ranks found nothing."""
        word = f"restore/{self._round}"
        if self._rank:
            self._coordinator.set(f"{word}/{self._rank}", problem or "ok")
            return self._hear(f"{word}/all", 0) == "ok"
        for peer in range(1, self._world_size):
            try:
                said = self._hear(f"{word}/{peer}", peer)
            except CheckpointError as given_up:
                self.give_up(given_up)
                raise
            if said != "ok":
                problem = problem or f"rank {peer}: {said}"
        self._coordinator.set(f"{word}/all", problem or "ok")
        if problem:
            self.skipped.append((str(self._chosen), problem))
        return not problem

    def give_up(self, problem: SpotguardError) -> None:
        """Tell the others that this rank cannot go on, for a reason that no older save mends."""
        name = self._rank if self._rank else "all"
        self._coordinator.set(f"restore/{self._round}/{name}", f"{_GIVEN_UP}{problem.message}")

    def _hear(self, word: str, rank: int) -> str:
        said = self._coordinator.get(word, TIMEOUT_S)
        if said is None:
            raise LostContact(f"no word of {word} from rank {rank} while restoring")
        if said.startswith(_GIVEN_UP):
            raise CheckpointError(f"rank {rank} could not restore: {said[len(_GIVEN_UP) :]}")
        return said

    def _first_present(self) -> str | None:
        """Return the next checkpoint whose files are there; what is not there is passed over."""
        if self._refs is None:
            self._refs = restorable(self._store)
        for ref in self._refs:
            self.newest_step = max(self.newest_step, ref.step)
            try:
                self._manifest = load_manifest(self._store, ref.prefix)
                check_shards_present(self._store, self._manifest)
            except DamagedCheckpoint as problem:
                self.skipped.append((ref.prefix, problem.message))
                if isinstance(problem, ArchivedCheckpoint):
                    self.archived.append(ref.prefix)
            else:
                return ref.prefix
        return None


def _read(
    manifest: Manifest,
    state: Mapping[str, Any],
    tensors: StoredTensors,
    objects: Mapping[str, Tracked],
) -> list[Finish]:
    """Read what the objects need of a checkpoint; return what completes their restore."""
    missing = sorted(set(objects) - set(state))
    unexpected = sorted(set(state) - set(objects))
    if missing or unexpected:
        changes = [f"{name} is new" for name in missing] + [
            f"{name} is no longer tracked" for name in unexpected
        ]
        tensors.differs(
            StateMismatch(
                f"run.track does not fit the checkpoint at step {manifest.step}: "
                f"{'; '.join(changes)}",
                hint=SAME_OBJECTS,
            )
        )
    finishers = [
        objects[name].restore(name, state[name], tensors)
        for name in sorted(set(objects) & set(state), key=lambda n: (_order(objects[n]), n))
    ]
    tensors.read()
    return finishers


def read_back(
    store: ObjectStore, step: int, objects: Mapping[str, Tracked], rank: int, world_size: int
) -> None:
    """Give `objects` the values that they have in the run's checkpoint of `step`.

    Raises:
        DamagedCheckpoint: it is not kept, or not whole.
        StateMismatch: it does not hold these objects, or of other shapes.
    """
    ref = next((ref for ref in restorable(store) if ref.step == step), None)
    if ref is None:
        raise DamagedCheckpoint(f"no checkpoint of step {step} is kept")
    manifest = load_manifest(store, ref.prefix)
    missing = sorted(set(objects) - set(manifest.state))
    if missing:
        raise StateMismatch(f"the checkpoint of step {step} holds no {', '.join(missing)}")
    tensors = StoredTensors(store, manifest, named=base_files(objects))
    state = trees_of(manifest, rank, world_size, objects, tensors)
    finishers = [item.restore(n, state[n], tensors) for n, item in objects.items()]
    tensors.read()
    for finish in finishers:
        finish()


def best_step(store: ObjectStore, value: float) -> int:
    """Return after how many steps the best state was saved whose metric had this value.

    Where its save came to nothing, the best one before it, with a warning.

    Raises:
        DamagedCheckpoint: none is kept.
    """
    kept = _kept_best(store)
    if kept is None:
        raise DamagedCheckpoint(f"the state with the best value, {value:g}, was not saved")
    step, of_kept = kept
    if of_kept != value:
        log.warning(
            "the state with the best value, %g, was not saved; step %d has the best that was: %s",
            *(value, step, of_kept),
        )
    return step


def best_that_is_kept(store: ObjectStore, best: BestState) -> BestState:
    """Return what a resume takes for the best: a value whose state was saved, or is to be.

    The end of an attempt may have come while it was being saved. Only a better value is saved
    after it, so the state that goes with this one would be missing for good.
    """
    kept = _kept_best(store)
    value = None if kept is None else kept[1]
    if value != best.value:
        log.warning(
            "the state with the best value, %g, was not saved; of those that are, the best has %s",
            *(best.value, value),
        )
    return best._replace(value=value)


def _kept_best(store: ObjectStore) -> tuple[int, float | None] | None:
    """Return the step and the value of the newest best state of the run's history."""
    for ref in restorable(store):
        try:
            manifest = load_manifest(store, ref.prefix)
        except DamagedCheckpoint:  # as a resume passes over it
            continue
        if manifest.kind is CheckpointKind.BEST:
            return ref.step, BestState.of(manifest.counters).value
    return None


def _order(item: Tracked) -> int:
    """Modules first, then optimizers, then what refers to them."""
    if isinstance(item.value, torch.nn.Module):
        return 0
    return 1 if isinstance(item.value, torch.optim.Optimizer) else 2


def restore_random(manifest: Manifest, rank: int, world_size: int) -> bool:
    """Put back this rank's random states; False if the checkpoint has none for this rank."""
    own: Any = manifest.ranks.get(str(rank)) or {}
    tree = {name: value for name, value in own.items() if name not in BESIDE_RANDOM}
    if not tree or manifest.world_size != world_size:
        return False
    put_random_back(tree)
    return True


def put_random_back(tree: Any) -> None:
    """Put back the random states that `random_tree` has made JSON of."""
    plain = unpack(tree, _no_tensor)
    states: dict[str, Any] = {
        name: torch.frombuffer(bytearray(value), dtype=torch.uint8)
        if isinstance(value, bytes)
        else value
        for name, value in plain.items()
    }
    if "numpy" in states:
        import numpy as np

        inner = states["numpy"]["state"]
        if isinstance(inner.get("key"), list):
            inner["key"] = np.array(inner["key"], dtype=np.uint32)
    restore_random_states(states)


def places_of_ranks(manifest: Manifest) -> dict[int, Any]:
    """Return where each rank was in its own data, for the ranks that told."""
    return {
        int(rank): own[PLACE]
        for rank, own in manifest.ranks.items()
        if isinstance(own, dict) and PLACE in own
    }


def _no_tensor(name: str) -> torch.Tensor:
    raise DamagedCheckpoint(f"a random state names the tensor {name!r}")
