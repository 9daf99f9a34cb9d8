"""Random generators that a script seeds by its rank: each rank goes on where its own was."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from spotguard.checkpoint.lineage import restorable
from spotguard.checkpoint.manifest import load_manifest
from spotguard.errors import DamagedCheckpoint, StateMismatch
from spotguard.runtime.checkpoint.rank_generators import RankGenerators
from spotguard.runtime.state.tracked import RandomGenerator
from spotguard.testing import FakeRendezvous, MemoryStore
from tests.runtime.harness.lab import Rank, adapters, together

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.checkpoint.manifest import Manifest

SEED = 7
MAKE: dict[str, Callable[[int], Any]] = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "python": random.Random,
    "numpy": np.random.default_rng,
    "numpy's old": np.random.RandomState,
    "numpy's old over another": lambda seed: np.random.RandomState(np.random.PCG64(seed)),
}


def drawn(generator: Any) -> list[float]:
    """Return what it draws next."""
    if isinstance(generator, torch.Generator):
        return [float(each) for each in torch.rand(3, generator=generator)]
    return [float(generator.random()) for _ in range(3)]


def team(store: MemoryStore, generators: list[Any], *, attempt: int = 1) -> list[Rank]:
    """Return the ranks of an attempt, each with its generator, resumed if there is a checkpoint."""
    words, world = FakeRendezvous(), len(generators)
    ranks = [
        Rank(store, r, world, attempt=attempt, coordinator=words.rank(r)) for r in range(world)
    ]

    def begin(rank: Rank) -> None:
        objects = adapters({"noise": generators[rank.rank]})
        found = RankGenerators.found(objects, rank.coordinator, rank.rank, world, 5.0)
        rank.saver.generators = found
        manifest = rank.start(noise=generators[rank.rank]).manifest
        if manifest is not None:
            states = found.read(manifest, rank.rank)
            found.restore(states, manifest, objects, rank.rank, SEED)

    assert together(*(lambda rank=rank: begin(rank) for rank in ranks)) == [None] * world
    return ranks


def trained(kind: str, seeds: list[int]) -> tuple[MemoryStore, list[list[float]]]:
    """Return a store with a save, and what each rank draws after it."""
    store = MemoryStore()
    generators = [MAKE[kind](seed) for seed in seeds]
    ranks = team(store, generators)
    for generator in generators:
        drawn(generator)
    saved = together(*(lambda r=r: r.now(10, noise=generators[r.rank]) for r in ranks))
    assert not [each for each in saved if isinstance(each, Exception)]
    return store, [drawn(each) for each in generators]


def resumed(
    store: MemoryStore, kind: str, seeds: list[int], *, attempt: int = 2
) -> list[list[float]]:
    """Return what each rank of another attempt draws."""
    generators = [MAKE[kind](seed) for seed in seeds]
    team(store, generators, attempt=attempt)
    return [drawn(each) for each in generators]


def manifest_of(store: MemoryStore) -> Manifest:
    """Return that of the newest checkpoint."""
    return load_manifest(store, next(iter(restorable(store))).prefix)


@pytest.mark.parametrize("kind", MAKE)
def test_each_rank_goes_on_with_its_own(kind: str) -> None:
    """Seeded by the rank, three of them draw on as if nothing had happened."""
    store, after = trained(kind, [100, 101, 102])
    assert resumed(store, kind, [100, 101, 102]) == after


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_all_ranks_have_alike_stays_alike(kind: str, ranks: int) -> None:
    """On any number of ranks; a checkpoint holds it once."""
    store, after = trained(kind, [5, 5, 5])
    assert "generators" not in str(manifest_of(store).ranks)
    assert resumed(store, kind, [5] * ranks) == [after[0]] * ranks


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("ranks", [2, 5])
def test_on_another_number_of_ranks_no_two_draw_the_same(kind: str, ranks: int) -> None:
    """Those that the checkpoint knows go on, more of them draw something of their own."""
    store, after = trained(kind, [100, 101, 102])
    now = resumed(store, kind, list(range(100, 100 + ranks)))
    assert now[:3] == after[:ranks]
    assert len({tuple(each) for each in now}) == ranks
    again = resumed(store, kind, list(range(100, 100 + ranks)), attempt=3)
    assert again == now, "the same at each try"


def test_what_was_one_ranks_is_not_all_ranks() -> None:
    """The first of three goes on with it."""
    store, [alone] = trained("torch", [100])
    now = resumed(store, "torch", [100, 101, 102])
    assert now[0] == alone
    assert len({tuple(each) for each in now}) == 3


def test_what_one_rank_saved_alone_is_no_other_ranks() -> None:
    """The state that stands for all is then the last rank's: it goes on, the others begin anew."""
    store, _ = trained("torch", [100, 101, 102])
    generators = [MAKE["torch"](seed) for seed in (100, 101, 102)]
    last = team(store, generators, attempt=2)[2]
    objects = adapters({"noise": generators[2]})
    kind = manifest_of(store).kind
    last.saver.save_now(last.saver.capture(20, kind, objects, {}, solo=True), solo=True)
    assert manifest_of(store).step == 20
    now = resumed(store, "torch", [100, 101, 102], attempt=3)
    assert now[2] == drawn(generators[2])
    assert len({tuple(each) for each in now}) == 3


@pytest.mark.parametrize(
    "kept",
    [
        {},
        {"tree": 1},
        {"tree": {"$": "t"}, "leaves": {}},
        {"tree": {"$": "tensor", "name": "x"}, "leaves": {"x": ["U8", 10**30]}},
        {"tree": {"$": "complex", "value": []}, "leaves": {}},
        {"tree": 1, "leaves": 7},
        "x",
        None,
    ],
    ids=str,
)
def test_a_state_that_makes_no_sense_is_said_to_be_so(kept: Any) -> None:
    """It is never an exception of another kind; a rank without one begins anew."""
    store, _ = trained("torch", [100, 101])
    manifest = manifest_of(store)
    ranks = {**manifest.ranks, "1": {"generators": {"noise": kept}}, "x": 1}
    damaged = replace(manifest, ranks=ranks)
    objects = adapters({"noise": MAKE["torch"](101)})
    mine = RankGenerators(frozenset({"noise"}))
    if kept is None:
        mine.restore(mine.read(damaged, 1), damaged, objects, 1, SEED)
        return
    with pytest.raises((DamagedCheckpoint, StateMismatch)):
        mine.restore(mine.read(damaged, 1), damaged, objects, 1, SEED)


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("python", (3, (-1,) * 625, None)),
        ("python", (3, (10**80,) * 625, None)),
        ("python", 7),
        ("numpy", {"bit_generator": "PCG64", "state": {"state": -1, "inc": 1}}),
        ("numpy", {"bit_generator": "PCG64"}),
        ("torch", torch.zeros(3, dtype=torch.uint8)),
        ("numpy's old", {"bit_generator": "MT19937", "state": {"key": [1], "pos": 2**80}}),
    ],
    ids=str,
)
def test_a_generator_says_what_it_cannot_take(kind: str, state: Any) -> None:
    """By its name."""
    with pytest.raises(StateMismatch, match="noise is a"):
        RandomGenerator(MAKE[kind](1)).write("noise", state)


def test_a_generator_of_another_kind_is_refused_by_name() -> None:
    """A script that draws from NumPy now, where it drew from torch, hears which one that is."""
    store, _ = trained("torch", [100])
    with pytest.raises(StateMismatch, match="noise is a Generator"):
        Rank(store, attempt=2).start(noise=np.random.default_rng(1))
    other = np.random.default_rng(1)
    restored = Rank(store, attempt=2).restore(adapters({"noise": other}), strict=False)
    assert restored.manifest is not None
    assert "noise is a Generator" in restored.differences[0]
    assert drawn(other) == drawn(np.random.default_rng(1)), "it is as the script made it"
