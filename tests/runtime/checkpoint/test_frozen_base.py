"""What no step changes is stored once, by whichever rank, and every checkpoint has it."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from spotguard.checkpoint.lineage import claim_attempt
from spotguard.checkpoint.manifest import load_manifest
from spotguard.checkpoint.outside import BaseFiles
from spotguard.errors import CheckpointError, DamagedCheckpoint, StoreUnavailable
from spotguard.events import keys
from spotguard.events.states import CheckpointKind
from spotguard.runtime.state.tracked import frozen_addresses, tracked
from spotguard.testing import FakeRendezvous, FaultyStore, MemoryStore
from tests.checkpoint.crashes.savings import flip
from tests.runtime.harness.lab import Rank, raw, together

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spotguard.runtime.state.tracked import Tracked
    from spotguard.storage.base import ObjectStore

STORED = 40 * 40 * 4


class Adapted(nn.Module):
    """A frozen layer of 6 kB, a frozen bias, and a small one that learns."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(40, 40).requires_grad_(False)
        self.adapter = nn.Linear(40, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what it makes of `x`."""
        found: torch.Tensor = self.adapter(self.base(x))
        return found


class Attempt:
    """A rank that trains such a model, as `run.track(model=..., frozen="skip")` tracks it.

    With `paths` as `base=` does that names these files.
    """

    def __init__(
        self, store: ObjectStore, number: int = 1, *paths: Path, seed: int = 0, **over: Any
    ) -> None:
        self.model = Adapted(seed)
        base = BaseFiles(paths) if paths else None
        self.objects: dict[str, Tracked] = {
            "model": tracked("model", self.model, skips_frozen=True, base=base)
        }
        self.rank = Rank(store, attempt=number, **over)

    def begin(self) -> None:
        """Restore and claim, and take the base, as the runtime does before the first step."""
        found = self.rank.restore(self.objects)
        if self.rank.rank == 0:
            claim_attempt(self.rank.store, self.rank.attempt, found.prefix)
        self.rank.saver.parent = found.prefix
        self.rank.saver.take_base(self.objects, found.bases)

    def save(self, step: int, *, solo: bool = False) -> None:
        """Train, and save at once."""
        with torch.no_grad():
            self.model.adapter.weight.fill_(step)
        capture = self.rank.saver.capture(
            step, CheckpointKind.PERIODIC, self.objects, {}, solo=solo
        )
        self.rank.saver.save_now(capture, solo=solo)


def attempt(store: ObjectStore, number: int = 1, *paths: Path, **over: Any) -> Attempt:
    """Return an attempt that has begun."""
    made = Attempt(store, number, *paths, **over)
    made.begin()
    return made


def frozen(store: ObjectStore) -> list[str]:
    """Return the keys of what was stored once."""
    return sorted(info.key for info in store.list(keys.FROZEN))


def own_bytes(store: ObjectStore, step: int, number: int = 1) -> int:
    """Return the bytes of tensors that lie in a checkpoint's own folder."""
    manifest = load_manifest(store, keys.checkpoint(step, number))
    return sum(shard.size_bytes - shard.header_bytes for shard in manifest.own)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    """Return whether all of two modules' state is the same bits."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(raw(mine) == raw(theirs) for mine, theirs in pairs)


def test_a_model_with_adapters_is_tracked_like_that_by_itself() -> None:
    """What PEFT has adapted needs no word, in a wrapper of the script's or a framework's, too."""
    inner = Adapted(0)
    whole = nn.ModuleDict({"inner": inner})
    assert not frozen_addresses({"model": tracked("model", whole)})
    inner.__dict__["peft_config"] = {"default": object()}
    base = {p.data_ptr() for p in inner.base.parameters()}
    assert frozen_addresses({"model": tracked("model", whole)}) == base


def test_a_base_is_stored_once_and_comes_back_exactly() -> None:
    """Saves hold what learns; the next attempt has all, and stores no second base."""
    store = MemoryStore()
    first = attempt(store)
    for step in (10, 20, 30):
        first.save(step)
    assert len(frozen(store)) == 1
    assert own_bytes(store, 30) == (40 * 2 + 2) * 4
    assert load_manifest(store, keys.checkpoint(30, 1)).schema == 2

    second = attempt(store, 2, seed=1)
    assert same_weights(second.model, first.model)
    second.save(40)
    assert len(frozen(store)) == 1, "the one that was restored is referred to again"
    assert same_weights(attempt(store, 3, seed=2).model, second.model)


def test_retention_never_takes_what_is_referred_to() -> None:
    """The first checkpoint of many goes; what it stored with it stays for those that are kept."""
    store = MemoryStore()
    first = attempt(store)
    for step in range(10, 80, 10):
        first.save(step)
    kept = {info.key.split("/")[1] for info in store.list(keys.CHECKPOINTS)}
    assert len(kept) == 2
    assert same_weights(attempt(store, 2, seed=1).model, first.model)


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "unfrozen": lambda base: base.weight.requires_grad_(True),
    "written to": lambda base: base.weight.mul_(2),
    "written to behind its version": lambda base: base.weight.data.mul_(2),
    "put elsewhere": lambda base: setattr(base.weight, "data", base.weight.detach() * 2),
    "replaced": lambda base: setattr(base, "weight", nn.Parameter(base.weight.detach() * 3)),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("stored_before", [True, False])
def test_a_base_that_changes_is_noticed(
    how: str, stored_before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Before each save; from then on what changed is saved with the rest, in each checkpoint."""
    store = MemoryStore()
    first = attempt(store)
    if stored_before:
        first.save(10)
    with torch.no_grad(), caplog.at_level(logging.INFO):
        CHANGES[how](first.model.base)
        first.save(20)
        if how == "unfrozen":
            first.model.base.weight.add_(1)
        first.save(30)
    assert "model.base.weight" in caplog.text
    assert own_bytes(store, 30) == STORED + (40 * 2 + 2) * 4
    second = attempt(store, 2, seed=1)
    assert same_weights(second.model, first.model)
    second.save(40)
    assert same_weights(attempt(store, 3, seed=2).model, second.model)


def test_what_learns_at_first_is_saved_when_it_is_frozen_later() -> None:
    """Only what is frozen when the loop begins is stored once; the rest is saved, frozen or not."""
    store = MemoryStore()
    first = attempt(store)
    first.model.adapter.requires_grad_(False)
    first.save(10)
    assert own_bytes(store, 10) == (40 * 2 + 2) * 4
    assert same_weights(attempt(store, 2, seed=1).model, first.model)


def test_a_damaged_base_is_never_restored() -> None:
    """Its hash is in the manifest, and every byte that is read of it is proven."""
    store = MemoryStore()
    attempt(store).save(10)
    [key] = frozen(store)
    flip(store, key, 5000)
    with pytest.raises(DamagedCheckpoint, match="frozen/000001/"):
        attempt(store, 2, seed=1)


def test_a_base_that_is_there_already_is_not_read() -> None:
    """A script loads its base by itself; that it is the right one is proven by its hash alone."""
    store = FaultyStore(MemoryStore())
    first = attempt(store)
    first.save(10)
    read: list[tuple[str, int]] = []
    original = store.get_into

    def get_into(key: str, start: int, into: Any) -> None:
        read.append((key, start))
        original(key, start, into)

    store.get_into = get_into  # type: ignore[method-assign, assignment]
    second = attempt(store, 2, seed=0)
    assert [start for key, start in read if key.startswith(keys.FROZEN)] == [0], "its header only"
    assert same_weights(second.model, first.model)
    with torch.no_grad():
        changed = Attempt(store, 3, seed=0)
        changed.model.base.weight[39, 39] += 1
        changed.begin()
    assert len([1 for key, start in read if key.startswith(keys.FROZEN) and start]) == 1
    assert same_weights(changed.model, first.model)


def test_a_base_is_stored_before_a_save_needs_it() -> None:
    """In the background after the first step, and saves begin once it is there."""
    store = MemoryStore()
    first = attempt(store)
    first.rank.saver.warm(first.objects)
    while not first.rank.saver.may_save(3):
        threading.Event().wait(0.01)
    assert len(frozen(store)) == 1


def test_a_failed_base_fails_its_save_and_no_later_one() -> None:
    """Nothing refers to what was not stored."""
    store = FaultyStore(MemoryStore())
    first = attempt(store)
    store.fail("put", key_contains="frozen/")
    with pytest.raises(StoreUnavailable):
        first.save(10)
    assert not list(store.inner.list(keys.checkpoint(10, 1) + "manifest"))
    first.save(20)
    assert same_weights(attempt(store.inner, 2, seed=1).model, first.model)


def test_a_base_that_is_changed_while_it_is_stored_does_not_count() -> None:
    """Bytes and hash of a file must be of one moment; the next save takes the base anew."""
    store = FaultyStore(MemoryStore())
    first = attempt(store)

    def meanwhile(_key: str) -> None:
        with torch.no_grad():
            first.model.base.weight.add_(1)

    store.before("put", meanwhile, key_contains="frozen/")
    with pytest.raises(CheckpointError, match="was changed while it was stored"):
        first.save(10)
    store.before("put", lambda _key: None, key_contains="frozen/")
    first.save(20)
    assert same_weights(attempt(store.inner, 2, seed=1).model, first.model)


@pytest.mark.parametrize("base_was_stored", [True, False])
def test_a_replica_saves_alone_with_the_base(base_was_stored: bool) -> None:
    """When the rank that stored the base is gone, another refers to it, or stores it itself."""
    store = MemoryStore()
    words = FakeRendezvous()
    three = [
        Attempt(store, rank=rank, world_size=3, coordinator=words.rank(rank)) for rank in range(3)
    ]
    for problem in together(*(each.begin for each in three)):
        assert problem is None
    if base_was_stored:
        assert together(*((lambda e=each: e.save(10)) for each in three)) == [None] * 3
    three[1].save(20, solo=True)
    manifest = load_manifest(store, keys.checkpoint(20, 1))
    [base] = manifest.bases
    assert base.file.startswith("rank-00000" if base_was_stored else "rank-00001")
    assert same_weights(attempt(store, 2, seed=1).model, three[1].model)


def test_tensors_of_one_model_that_are_not_tracked_so_are_saved_as_ever() -> None:
    """Without the word nothing is left out, and the manifest is as earlier versions read it."""
    rank = Rank()
    rank.start()
    model = Adapted(0)
    rank.now(10, model=model)
    manifest = load_manifest(rank.store, keys.checkpoint(10, 1))
    assert (manifest.schema, manifest.bases) == (1, ())
    assert frozen(rank.store) == []
