"""What the ranks do not hold alike is each rank's own to save: a resume loses nothing of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from spotguard.checkpoint.lineage import restorable
from spotguard.checkpoint.manifest import load_manifest
from spotguard.errors import CheckpointError, StateMismatch
from spotguard.events.states import CheckpointKind
from spotguard.runtime.state.tracked import Box
from spotguard.testing import FakeRendezvous, MemoryStore
from tests.runtime.harness.lab import Rank, adapters, together

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotguard.runtime.state.tracked import Tracked

WORLD = 3


class SharedOut(torch.optim.Optimizer):
    """As the Muon of nanochat and modded-nanogpt: each rank keeps the momentum of its parameters.

    `sliced`: as their distributed Adam, it keeps a slice of each parameter's.
    """

    def __init__(self, params: Any, rank: int, world: int, *, sliced: bool = False) -> None:
        super().__init__(params, {"lr": 0.1})
        self.rank, self.world, self.sliced = rank, world, sliced

    def step(self, closure: Any = None) -> Any:
        """Keep what is this rank's of each gradient."""
        for number, p in enumerate(self.param_groups[0]["params"]):
            mine = number % self.world == self.rank
            grad = p.grad.view(-1)[self.rank :: self.world] if self.sliced else p.grad
            if mine or self.sliced:
                kept = self.state[p].setdefault("momentum_buffer", torch.zeros_like(grad))
                kept.mul_(0.9).add_(grad, alpha=1.0 + self.rank)


class Script:
    """A rank's model and optimizer, and what it tells."""

    def __init__(self, make: Callable[[Any, int, int], Any], rank: int, world: int) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
        self.optimizer = make(self.model.parameters(), rank, world)
        self.seen = Box(0)
        self.told: list[str] = []

    @property
    def objects(self) -> dict[str, Tracked]:
        """What it tracks."""
        values = {"model": self.model, "optimizer": self.optimizer, "seen": self.seen}
        return adapters(values)

    def step(self, number: int) -> None:
        """Do a step."""
        for p in self.model.parameters():
            p.grad = torch.full_like(p, float(number))
        self.optimizer.step()

    def held(self) -> list[Any]:
        """Return what the optimizer holds, by parameter."""
        params = list(self.model.parameters())
        state = self.optimizer.state
        return [
            {k: v.tolist() for k, v in state[p].items()} if p in state else None for p in params
        ]


def team(
    store: MemoryStore, make: Callable[[Any, int, int], Any], world: int, attempt: int
) -> tuple[list[Rank], list[Script], list[Any]]:
    """Return the ranks of an attempt that has restored, their scripts, and what came of it."""
    words = FakeRendezvous()
    ranks = [
        Rank(store, r, world, attempt=attempt, coordinator=words.rank(r)) for r in range(world)
    ]
    scripts = [Script(make, r, world) for r in range(world)]

    def begin(rank: Rank, script: Script) -> Any:
        found = rank.start(**{name: item.value for name, item in script.objects.items()})
        rank.saver.parts.adopt(found.manifest)
        return found

    came = together(*(lambda r=r, s=s: begin(r, s) for r, s in zip(ranks, scripts, strict=True)))
    return ranks, scripts, came


def train(ranks: list[Rank], scripts: list[Script], first: int, last: int) -> list[Any]:
    """Do steps on all ranks, comparing as the runtime does, and save the last; return what came."""

    def work(rank: Rank, script: Script) -> Any:
        for number in range(first, last + 1):
            script.step(number)
            if number == first:
                rank.saver.parts.compare(script.objects, script.told.append)
        capture = rank.saver.capture(last, CheckpointKind.PERIODIC, script.objects, {})
        return rank.saver.save_now(capture)

    return together(*(lambda r=r, s=s: work(r, s) for r, s in zip(ranks, scripts, strict=True)))


MAKE: dict[str, Callable[[Any, int, int], Any]] = {
    "whole parameters": SharedOut,
    "slices": lambda params, rank, world: SharedOut(params, rank, world, sliced=True),
}


@pytest.mark.parametrize("how", MAKE)
def test_a_state_that_is_shared_out_goes_on_on_each_rank(how: str) -> None:
    """Each of three ranks has its own momentum again; what comes after it is as undisturbed."""
    store = MemoryStore()
    ranks, scripts, _ = team(store, MAKE[how], WORLD, 1)
    assert not [each for each in train(ranks, scripts, 1, 5) if isinstance(each, Exception)]
    before = [script.held() for script in scripts]
    assert before[0] != before[1] != before[2]
    assert [said.split(":")[0] for said in scripts[0].told] == [
        "rank 1 holds another optimizer than rank 0"
    ]
    _, again, came = team(store, MAKE[how], WORLD, 2)
    assert not [each for each in came if isinstance(each, Exception)]
    assert [script.held() for script in again] == before


@pytest.mark.parametrize("how", MAKE)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_on_another_number_of_ranks_it_is_refused(how: str, world: int) -> None:
    """In one sentence, on all ranks, and nothing was changed."""
    store = MemoryStore()
    train(*team(store, MAKE[how], WORLD, 1)[:2], 1, 3)
    _, scripts, came = team(store, MAKE[how], world, 2)
    assert all(isinstance(each, CheckpointError) for each in came)
    said = next(each for each in came if isinstance(each, StateMismatch))
    assert said.message == (
        f"optimizer was another one on each of 3 ranks at step 3, and now there are {world}"
    )
    assert said.hint is not None
    assert "as many ranks" in said.hint
    assert not any(script.optimizer.state for script in scripts)


def test_what_is_alike_is_stored_once_and_told_of_nobody() -> None:
    """The usual optimizer: other ranks store nothing, and any number of ranks goes on with it."""
    store = MemoryStore()
    make: Any = lambda params, rank, world: torch.optim.AdamW(params, lr=0.1)  # noqa: E731
    ranks, scripts, _ = team(store, make, WORLD, 1)
    train(ranks, scripts, 1, 4)
    manifest = load_manifest(store, next(iter(restorable(store))).prefix)
    assert len(manifest.shards) == 1
    assert "per_rank" not in manifest.counters
    assert not any(script.told for script in scripts)
    _, again, _ = team(store, make, 2, 2)
    assert [script.held() for script in again] == [script.held() for script in scripts[:2]]


def test_a_model_that_parts_from_rank_to_rank_comes_back_on_each() -> None:
    """As experts of which each rank has its own; a counter is told of, and the first rank's."""
    store = MemoryStore()
    make: Any = lambda params, rank, world: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    ranks, scripts, _ = team(store, make, WORLD, 1)
    for number, script in enumerate(scripts):
        script.seen.value = number * 10
        with torch.no_grad():
            next(iter(script.model[2].parameters()))[3, 3] = number
    train(ranks, scripts, 1, 2)
    assert sorted(said.split(" than ")[0] for said in scripts[0].told) == [
        "rank 1 holds another model",
        "rank 1 holds another seen",
    ]
    before = [script.model.state_dict() for script in scripts]
    _, again, _ = team(store, make, WORLD, 2)
    assert [script.seen.value for script in again] == [0, 0, 0]
    for script, was in zip(again, before, strict=True):
        assert all(
            torch.equal(a, b)
            for a, b in zip(script.model.state_dict().values(), was.values(), strict=True)
        )


@pytest.mark.parametrize("world", [1, 2, WORLD])
def test_a_small_object_of_each_ranks_is_the_first_ones_for_all_and_it_is_told(world: int) -> None:
    """So a rank that is left alone can save it; the log and the history say what is lost."""
    store = MemoryStore()
    make: Any = lambda params, rank, world: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    ranks, scripts, _ = team(store, make, WORLD, 1)
    for number, script in enumerate(scripts):
        script.seen.value = number * 10 + 7
    train(ranks, scripts, 1, 2)
    assert [said for said in scripts[0].told if "seen" in said] == [
        "rank 1 holds another seen than rank 0: a resume gives all ranks the one of the rank that "
        "saved, as a rule rank 0"
    ]
    assert not any(rank.saver.parts.names for rank in ranks), "no rank needs the others to save"
    _, again, _ = team(store, make, world, 2)
    assert [script.seen.value for script in again] == [7] * world


def test_what_begins_to_part_later_is_found_after_a_later_step() -> None:
    """An optimizer that first steps at the third step: compared after the 1st, 2nd, 4th … step."""
    store = MemoryStore()
    ranks, scripts, _ = team(store, SharedOut, WORLD, 1)

    def work(rank: Rank, script: Script) -> list[int]:
        parts = rank.saver.parts
        compared = []
        for number in range(1, 10):
            before = parts._round
            if number == 3:
                script.step(number)
            parts.after_step(number, script.objects, script.told.append)
            if parts._round > before:
                compared.append(number)
        return compared

    done = together(*(lambda r=r, s=s: work(r, s) for r, s in zip(ranks, scripts, strict=True)))
    assert done == [[1, 2, 4, 8]] * WORLD
    assert all(rank.saver.parts.names == {"optimizer"} for rank in ranks)


def test_a_rank_that_is_gone_is_not_waited_for() -> None:
    """Nothing is known then, and the ranks that are left go on to save what they can."""
    words = FakeRendezvous()
    ranks = [Rank(MemoryStore(), r, WORLD, coordinator=words.rank(r)) for r in range(2)]
    for rank in ranks:
        rank.saver.alone.set()
    scripts = [Script(SharedOut, r, WORLD) for r in range(2)]
    came = together(
        *(
            lambda r=r, s=s: r.saver.parts.compare(s.objects, s.told.append)
            for r, s in zip(ranks, scripts, strict=True)
        )
    )
    assert came == [None, None]
    assert not ranks[0].saver.parts.names


def test_no_rank_saves_for_others_what_each_has_of_its_own() -> None:
    """With its peers gone a rank has a part only: the checkpoint before stands."""
    store = MemoryStore()
    ranks, scripts, _ = team(store, SharedOut, WORLD, 1)
    train(ranks, scripts, 1, 2)
    rank, script = ranks[1], scripts[1]
    capture = rank.saver.capture(3, CheckpointKind.EMERGENCY, script.objects, {}, solo=True)
    with pytest.raises(CheckpointError, match="cannot be saved without the other ranks"):
        rank.saver.save_now(capture, solo=True)
