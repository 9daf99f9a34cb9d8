"""Saving: capture at a step boundary, then write and commit, in the background or at once.

Periodic: the state is copied into a reused flat buffer, most of it while the next forward and
backward run (`staging`), and a background thread hashes, writes and commits. Emergency and final:
the shard is written straight from the live tensors, because nobody will change them any more.

Every rank with something of its own to store writes one shard; the first rank collects what the
others wrote over the rendezvous and commits by writing the manifest last. A rank on its own
(its peers are gone) commits alone, which is whole unless the model is sharded.
"""

from __future__ import annotations

import logging
import platform
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from spotguard.checkpoint.lineage import check_not_fenced
from spotguard.checkpoint.manifest import Manifest, check_run, commit, load_manifest
from spotguard.checkpoint.retention import Retention, prune
from spotguard.checkpoint.shard import shard_file, write_layout
from spotguard.errors import AlreadyExists, CheckpointError, Fenced, SpotguardError, StoreError
from spotguard.events import keys
from spotguard.events.states import CheckpointKind
from spotguard.runtime.checkpoint.captured import (
    COMMITTED,
    REFUSALS,
    Capture,
    Declined,
    Held,
    OutOfContact,
    RankPart,
    Saved,
    WithoutOthers,
    heard_refusal,
    told_refusal,
    word_of,
)
from spotguard.runtime.checkpoint.early_base import BASE_TIMEOUT_S, EarlyBase
from spotguard.runtime.checkpoint.frozen_base import FrozenBase
from spotguard.runtime.checkpoint.own_state import EpochBegun, own_tree, random_tree
from spotguard.runtime.checkpoint.rank_generators import RankGenerators
from spotguard.runtime.checkpoint.staging import (
    Plan,
    Staged,
    StagingBuffer,
    WeightsChanged,
    live_views,
)
from spotguard.runtime.distributed.rank_parts import RankParts
from spotguard.runtime.process import clock
from spotguard.runtime.process.failed_saves import SaveTurns
from spotguard.runtime.process.finite import FINITE
from spotguard.runtime.process.surroundings import without_collections
from spotguard.runtime.state.pack_cache import Packer
from spotguard.runtime.state.tracked import base_files, frozen_addresses, trained_names
from spotguard.shared.node_locks import saving
from spotguard.shared.version import __version__
from spotguard.storage.deadline import give_up_after

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from spotguard.checkpoint.tensors import ShardInfo
    from spotguard.runtime.checkpoint.local_copy import LocalCopy
    from spotguard.runtime.distributed.rendezvous import Coordinator
    from spotguard.runtime.state.boundary_copy import BufferShadow
    from spotguard.runtime.state.tracked import Packs
    from spotguard.runtime.state.tree import Leaf
    from spotguard.storage.base import ObjectStore

log = logging.getLogger("spotguard")

_GIVE_UP_PATIENCE_S = 2.0
_LOOK_UP_S = 0.25
_PEER_TIMEOUT_S = 120.0
_BROKEN_OFF_AFTER_S = 86_400.0
_ROOM_FOR_COPY = 4.0  # an emergency save's own time, so often, must be left for a local copy


_Written = tuple["ShardInfo | None", "str | None"]  # a shard; which weight is not finite


class Saver:
    """Captures and stores checkpoints of one attempt; at most one save is in flight."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        run_id: str,
        attempt: int,
        rank: int,
        world_size: int,
        coordinator: Coordinator,
        retention: Retention,
        save_random: bool,
        local_copy: LocalCopy | None = None,
        saving_file: str | None = None,
        leaves_here: Callable[[], bool] = lambda: False,
        before_commit: Callable[[], None] = lambda: None,
        on_saved: Callable[[Saved, dict[str, Any]], None],
        on_failed: Callable[[int, SpotguardError], None],
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._attempt = attempt
        self._rank, self._world_size = rank, world_size
        self._coordinator, self._retention = coordinator, retention
        self._save_random = save_random
        self._local_copy, self._saving_file = local_copy, saving_file
        self._before_commit = before_commit
        self._on_saved = on_saved
        self._on_failed = on_failed
        self._packer = Packer()
        self._base: FrozenBase | None = None
        """What is stored once, if anything that is tracked is to be."""
        self._early: EarlyBase | None = None
        self._buffer = StagingBuffer()
        self._thread: threading.Thread | None = None
        self._connection: Coordinator | None = None
        self._plan: Plan | None = None
        self._staged: Staged | None = None
        self._stall_s = 0.0
        self._given_up = threading.Event()
        self._may_overlap = True
        self.turns = SaveTurns(coordinator, rank, world_size, self._waits_for_nobody)
        self._seen: dict[str, Manifest] = {}
        self.generators = RankGenerators()
        self.alone = threading.Event()
        """Set when another rank is gone, or all contact: no answer is waited for any more."""
        self._leaves_here = leaves_here  # returns True where all leave at this boundary
        self.parts = RankParts(coordinator, rank, world_size, self.alone.is_set)
        self.parent: str | None = None
        """The checkpoint that the next one descends from."""
        self.last: Saved | None = None
        self.rate_bytes_per_s: float | None = None
        """Measured: bytes of this rank's shard over the seconds to its commit."""

    @without_collections()
    def capture(
        self,
        step: int,
        kind: CheckpointKind,
        objects: Mapping[str, Packs],
        counters: dict[str, Any],
        *,
        solo: bool = False,
        random_states: dict[str, Any] | None = None,
        place: Any = None,
        buffers: BufferShadow | None = None,
        begun: EpochBegun | None = None,
    ) -> Capture:
        """Return the state of `objects` now; nothing is copied yet.

        `random_states` replaces those that the global generators have now, and `buffers` those of
        the modules; `place` is where this rank is in data that only it reads.
        """
        stored = self.parts.pack(self._packer, objects)
        leaves = list(stored.packed.leaves.values())
        sharded = any(leaf.global_shape is not None for leaf in leaves) or bool(self.parts.names)
        mine = self._mine(leaves, stored.own_leaves, solo)
        if self._base is not None:
            mine = self._base.changing(leaves, mine, frozen_addresses(objects))
            if solo and self._rank:
                self._base.take_over(self._bases_before())
        if buffers is not None:
            mine = buffers.over(mine)
        random = random_tree(random_states) if self._save_random else None
        return Capture(
            step=step,
            kind=kind,
            tree=stored.tree,
            leaves=mine,
            own=own_tree(random, place, self.generators.states(objects), begun, stored.own),
            counters={**counters, **self.parts.counters()},
            sharded=sharded or (place is not None and self._world_size > 1),
            trained=partial(trained_names, objects),
        )

    def _mine(self, leaves: list[Leaf], own: Container[str] = (), solo: bool = False) -> list[Leaf]:
        """Return what this rank stores: parts are stored by who holds them, replicas once."""
        if self._rank and not solo:
            return [leaf for leaf in leaves if leaf.global_shape is not None or leaf.name in own]
        return leaves

    def take_base(self, objects: Mapping[str, Packs], stored: Sequence[ShardInfo]) -> None:
        """Take what is frozen now as stored once; `stored` are bases that a restore has proven."""
        frozen = frozen_addresses(objects)
        if not frozen:
            return
        leaves = list(self._packer.pack(objects)[1].leaves.values())
        self._base = FrozenBase(
            self._store,
            run_id=self._run_id,
            attempt=self._attempt,
            rank=self._rank,
            world_size=self._world_size,
            files=base_files(objects),
        )
        self._base.take(leaves, self._mine(leaves), frozen)
        self._base.adopt(stored)

    def _bases_before(self) -> Sequence[ShardInfo]:
        """Return the bases of the checkpoint before; none if it cannot be read now."""
        try:
            return load_manifest(self._store, self.parent).bases if self.parent else ()
        except SpotguardError:
            return ()

    @without_collections()
    def save_in_background(self, capture: Capture, *, overlap: bool = False) -> None:
        """Copy the state and return; the rest happens in a thread. Waits for the save before.

        With `overlap`, what only a tracked optimizer's step changes is copied in the thread too:
        `wait_copied` must then be called before such a step.
        """
        started = time.monotonic()
        self.wait()
        plan = self._plan_of(capture.leaves)
        staged = self._buffer.stage(capture.leaves, plan, overlap=overlap and self._may_overlap)
        self._staged = staged
        self._stall_s = time.monotonic() - started
        if self._connection is None:  # of the background threads, of which one lives at a time
            self._connection = self._coordinator.connect()
        self._thread = threading.Thread(
            target=self._save_quietly,
            args=(capture, staged, plan, self._connection, started),
            name="spotguard-save",
            daemon=True,
        )
        self._thread.start()

    def warm(self, objects: Mapping[str, Packs]) -> None:
        """Make buffer and store ready in the background, so that no save need wait for it.

        A save that is in flight (a best state that was owed from the attempt before) goes first.
        """
        leaves = self.capture(0, CheckpointKind.PERIODIC, objects, {}).leaves
        plan = self._plan_of(leaves)
        in_flight = self._thread

        def make_ready() -> None:
            if in_flight is not None:
                in_flight.join()
            self._buffer.warm(leaves, plan)
            self._store.warm()
            if not self._rank:
                self._clean_up()

        self._thread = threading.Thread(target=make_ready, name="spotguard-warm", daemon=True)
        self._thread.start()
        if self._base is not None:
            self._early = EarlyBase(
                self._base,
                self._coordinator,
                rank=self._rank,
                world_size=self._world_size,
                saving_file=self._saving_file,
            )

    def _waits_for_nobody(self) -> bool:
        """Return True once another rank may have left without the word that is waited for.

        A stop can be agreed for this boundary after the gate: who comes later never saves here.
        """
        return self.alone.is_set() or self._leaves_here()

    def may_save(self, step: int) -> bool:
        """Return whether a periodic save due at `step` is to begin: not while bases are stored.

        All ranks call it, and get the same answer.
        """
        early = self._early is None or self._early.may_save(step)
        return early and self.turns.may_save(step, self.wait, self.last)

    @property
    def _patience_s(self) -> float:
        """Return how long a save may take that nobody is in a hurry for; the same on all ranks."""
        waits_for_base = self._early is not None and not self._early.are_stored
        return BASE_TIMEOUT_S if waits_for_base else _PEER_TIMEOUT_S

    def wait_copied(self) -> float:
        """Block until the tensors of a save in flight may change; return for how many seconds."""
        staged = self._staged
        if staged is None or staged.copied.is_set():
            return 0.0
        started = time.monotonic()
        staged.copy_rest()  # two hands are faster than one
        staged.copied.wait()
        waited_s = time.monotonic() - started
        self._stall_s += waited_s
        return waited_s

    def hold(self, capture: Capture, patience_s: float) -> Held | None:
        """Copy a state that may be saved later; None if the buffer is not free in time.

        From here on the buffer is its own: only `save_now` may be called.
        """
        self.wait(patience_s)
        if self._thread is not None:
            return None
        plan = self._plan_of(capture.leaves)
        return Held(capture, plan, self._buffer.stage(capture.leaves, plan, overlap=False).data)

    @without_collections()
    def save_now(
        self,
        capture: Capture,
        *,
        solo: bool = False,
        timeout_s: float | None = None,
        held: Held | None = None,
    ) -> Saved | None:
        """Store straight from the live tensors and return once committed (on every rank).

        With `solo` no other rank is waited for. The live tensors must not change meanwhile, unless
        the state is `held`.

        Raises:
            SpotguardError: it could not be stored; the previous checkpoint stands.
        """
        started = time.monotonic()
        timeout_s = self._patience_s if timeout_s is None else timeout_s
        in_flight = self._thread
        if in_flight is not None and in_flight.is_alive():
            # Its bytes are older than ours. If they are stored already, its commit is quick.
            self._given_up.set()
            self.wait(min(timeout_s / 2, _GIVE_UP_PATIENCE_S))
        if self.last is not None and self.last.step == capture.step:
            return self.last  # nothing has changed since
        plan = held.plan if held is not None else self._plan_of(capture.leaves)
        if held is not None:
            data = [held.data]
        elif in_flight is None or not in_flight.is_alive():
            data = self._buffer.gather(capture.leaves, plan)
        else:  # it was given up, but still reads the buffer
            data = live_views(capture.leaves, plan.layout)

        def write(prefix: str) -> _Written:
            shard = self._write(prefix, plan, data, lambda end: None)
            return shard, capture.first_not_finite(plan.layout, data)

        self._stall_s = 0.0
        try:
            saved = self._save(capture, write, self._coordinator, started, solo, timeout_s)
        except OutOfContact:
            self.alone.set()  # the ring may not have told yet
            raise
        if timeout_s > _ROOM_FOR_COPY * (time.monotonic() - started):
            self._keep_near(capture, plan, data)
        return saved

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until no save is in flight, `timeout_s` at most; return whether none is."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():  # and reads the buffer: who saves next has to know
                return False
            self._thread = None
        self._given_up = threading.Event()
        return True

    def _save_quietly(
        self,
        capture: Capture,
        staged: Staged,
        plan: Plan,
        connection: Coordinator,
        started: float,
    ) -> None:
        """Top of the background thread: copy, write, commit; a failure is reported, not raised."""
        given_up = self._given_up

        def go_on(end: int) -> str | None:
            if given_up.is_set():
                raise CheckpointError(f"the save of step {capture.step} gave way to a later one")
            staged.wait_ready(end)
            return staged.hashes.get(end)

        def write(prefix: str) -> _Written:
            shard = self._write(prefix, plan, [staged.data], go_on)
            staged.wait_ready()  # all of it, and nothing was changed meanwhile
            return shard, capture.first_not_finite(plan.layout, [staged.data])

        try:
            threading.Thread(
                target=staged.copy_rest,
                kwargs={"hashing": True},
                name="spotguard-copy",
                daemon=True,
            ).start()
            self._save(capture, write, connection, started, False, self._patience_s)
            self._keep_near(capture, plan, [staged.data])
        except WeightsChanged as problem:
            self._may_overlap = False  # this script is not as we took it to be
            self._on_failed(capture.step, problem)
        except SpotguardError as problem:
            if not given_up.is_set():
                self._on_failed(capture.step, problem)
        except Exception as problem:  # noqa: BLE001 - a thread's top: nobody else would hear of it
            self._on_failed(capture.step, CheckpointError(f"{type(problem).__name__}: {problem}"))

    def _plan_of(self, leaves: list[Leaf]) -> Plan:
        metadata = {"run_id": self._run_id}
        self._plan = Plan.of(leaves, metadata, self._plan, keep=self._packer.keeps)
        return self._plan

    def _save(
        self,
        capture: Capture,
        write: Callable[[str], _Written],
        connection: Coordinator,
        started: float,
        solo: bool,
        timeout_s: float,
    ) -> Saved:
        if solo and capture.sharded:
            raise WithoutOthers(
                "a sharded model, and what each rank has its own of, cannot be saved without the "
                "other ranks"
            )
        prefix = keys.checkpoint(capture.step, self._attempt)
        end = time.monotonic() + timeout_s
        base_s, word = 0.0, word_of(capture.step, capture.kind, self.turns.tries)
        try:
            with give_up_after(timeout_s), saving(self._saving_file):
                waits_from = time.monotonic()
                base = self._base.stored(timeout_s) if self._base is not None else ()
                base_s = time.monotonic() - waits_from
                own, wrong = write(prefix)
                shards = base if own is None else (own, *base)
                mine = RankPart(shards=shards, own=capture.own, not_finite=wrong)
                saved = self._meet(capture, prefix, mine, connection, word, end, solo)
        except AlreadyExists:  # a survivor beside us committed this very step
            saved = Saved.of(capture, prefix)
        except ConnectionError as problem:
            raise OutOfContact(f"step {capture.step} not saved: {problem}") from problem
        except BaseException as problem:  # whatever it is, the other ranks wait for a word
            ended = not isinstance(problem, Exception)  # by Ctrl-C, or by a handler of the script's
            alone = isinstance(problem, WithoutOthers) and self.alone.is_set()
            lost = ended or alone or isinstance(problem, OutOfContact)
            said = str(problem) if isinstance(problem, SpotguardError) else repr(problem)
            self._tell_not_saved(connection, word, told_refusal(problem, said, lost=lost))
            raise
        duration_s = time.monotonic() - started - base_s  # a base is stored once: no save's pace
        self.parent = prefix
        self.rate_bytes_per_s = max(capture.size_bytes, 1) / max(duration_s, 1e-3)
        self.last = replace(saved, stall_s=self._stall_s, duration_s=duration_s)
        if self._rank == 0 or solo:
            self._on_saved(self.last, capture.counters)
            if capture.kind is not CheckpointKind.EMERGENCY:  # nothing else may cost grace
                self._prune()
        return self.last

    def take_from_other(self, step: int, checkpoint: str) -> None:
        """Take note of a checkpoint that another rank has committed alone."""
        self.parent, self.last = checkpoint, Saved.by_other(step, checkpoint)

    def decline(self, step: int, kind: CheckpointKind, why: str) -> None:
        """Tell the other ranks that this one has no such state, so that none waits for it."""
        word = word_of(step, kind, self.turns.tries)
        self._tell_not_saved(self._coordinator, word, told_refusal(Declined(why), why))

    def _tell_not_saved(self, connection: Coordinator, word: str, said: str) -> None:
        try:
            connection.set(f"{word}/done" if not self._rank else f"{word}/{self._rank}", said)
        except ConnectionError as problem:
            log.warning("could not tell the other ranks: %s", problem)

    def _clean_up(self) -> None:
        """Free what saves of dead ranks left half-written; a living one may still be at it."""
        try:
            self._store.clean_up(older_than_s=_BROKEN_OFF_AFTER_S)
        except StoreError as problem:
            log.warning("what broken-off saves left behind stays for now: %s", problem)

    def _prune(self) -> None:
        """Delete what retention does not keep; what cannot be deleted now goes next time.

        The save is committed, whatever is found in its past: a damaged claim of old is no failure.
        """
        try:
            for prefix in prune(
                self._store, self._retention, attempt=self._attempt, load=self._manifest_of
            ):
                self._seen.pop(prefix, None)
        except Fenced:
            raise
        except SpotguardError as problem:
            log.warning("old checkpoints stay for now: %s", problem)

    def _manifest_of(self, store: ObjectStore, prefix: str) -> Manifest:
        """Return what retention asks of a manifest; each is read once, ours never."""
        if prefix not in self._seen:
            manifest = load_manifest(store, prefix)
            check_run(manifest, self._run_id)
            self._seen[prefix] = replace(manifest, state=None, ranks={})
        return self._seen[prefix]

    def _keep_near(self, capture: Capture, plan: Plan, data: list[memoryview]) -> None:
        if self._local_copy is not None and plan.layout.tensors:
            name = shard_file(self._rank, self._world_size)
            prefix = keys.checkpoint(capture.step, self._attempt)
            self._local_copy.keep(prefix, name, plan.layout, data)

    def _write(
        self, prefix: str, plan: Plan, data: list[memoryview], go_on: Callable[[int], str | None]
    ) -> ShardInfo | None:
        if not plan.layout.tensors and self._rank:
            return None
        name = shard_file(self._rank, self._world_size)
        return write_layout(self._store, prefix, name, plan.layout, data, go_on=go_on)

    def _meet(
        self,
        capture: Capture,
        prefix: str,
        mine: RankPart,
        connection: Coordinator,
        word: str,
        end: float,
        solo: bool,
    ) -> Saved:
        """Collect all ranks' shards and commit (first rank), or wait for that (the others)."""
        if solo:
            return self._commit(capture, prefix, {self._rank: mine})
        if self._rank == 0:
            parts = {0: mine}
            for peer in range(1, self._world_size):
                text = self._hear(connection, f"{word}/{peer}", end)
                if text is None:
                    raise WithoutOthers(f"step {capture.step} not saved: rank {peer} is silent")
                if text.startswith(REFUSALS):
                    raise heard_refusal(text, f"step {capture.step} not saved: rank {peer}: ")
                parts[peer] = RankPart.from_json(text)
            saved = self._commit(capture, prefix, parts)
            connection.set(f"{word}/done", COMMITTED)
            return saved
        connection.set(f"{word}/{self._rank}", mine.to_json())
        try:
            done = self._hear(connection, f"{word}/done", end)
        except ConnectionError:
            # Where no launcher keeps it, the rendezvous lives in the first rank, and ends with it:
            # perhaps it committed and left before its word was heard. Then the commit is the word.
            if self._store.head(keys.manifest(prefix)) is None:
                raise
            done = COMMITTED
        if done is None:
            raise WithoutOthers(f"step {capture.step} not saved: no answer")
        if done != COMMITTED:
            raise heard_refusal(done, f"step {capture.step} not saved: ")
        return Saved.of(capture, prefix)

    def _hear(self, connection: Coordinator, key: str, end: float) -> str | None:
        """Wait for a word of another rank, but not when one is gone: perhaps that very one."""
        left_s = end - time.monotonic()
        while True:
            text = connection.get(key, min(left_s, _LOOK_UP_S))
            left_s -= _LOOK_UP_S
            if text is not None or left_s <= 0 or self.alone.is_set():
                return text

    def _commit(self, capture: Capture, prefix: str, parts: dict[int, RankPart]) -> Saved:
        check_not_fenced(self._store, self._attempt)
        self._before_commit()
        # Ranks that hold the same parts may have taken over the same base.
        shards = dict.fromkeys(shard for part in parts.values() for shard in part.shards)
        python = platform.python_version()
        wrong = next((part.not_finite for part in parts.values() if part.not_finite), None)
        if wrong and capture.kind is CheckpointKind.BEST:
            capture = replace(capture, kind=CheckpointKind.PERIODIC)  # whatever its metric says
        manifest = Manifest(
            run_id=self._run_id,
            attempt=self._attempt,
            step=capture.step,
            kind=capture.kind,
            created_at=clock.now(),
            parent=self.parent,
            world_size=self._world_size,
            shards=tuple(sorted(shards, key=lambda shard: shard.folder is not None)),
            state=capture.tree,
            ranks={str(rank): part.own for rank, part in parts.items() if part.own is not None},
            counters={**capture.counters, FINITE: wrong is None},
            versions={"spotguard": __version__, "torch": torch.__version__, "python": python},
        )
        try:
            commit(self._store, manifest)
        except AlreadyExists:
            log.info("step %d was committed already, by a survivor or a save", capture.step)
        else:
            self._seen[prefix] = replace(manifest, state=None, ranks={})
        saved = replace(Saved.of(capture, prefix), size_bytes=manifest.size_bytes)
        return saved.with_health(wrong, [m for p, m in self._seen.items() if p != prefix])
