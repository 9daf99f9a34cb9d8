from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spotguard.errors import UsageError
from spotguard.events.states import CheckpointKind
from spotguard.runtime.state.boundary_copy import (
    BufferShadow,
    GroupShadow,
    ObjectShadow,
    StepShadow,
)
from spotguard.runtime.state.tree import Leaf
from spotguard.testing import MemoryStore
from tests.runtime.harness.lab import Rank, adapters, next_attempt


class Meter:
    """An object of the user's that counts in the loop's body."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.sum = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        """Return live state, as many do."""
        return {"values": self.values, "sum": self.sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.values, self.sum = state["values"], state["sum"]


def objects() -> dict[str, Any]:
    """Return one of each kind that a step changes before its weights."""
    return {
        "noise": random.Random(1),
        "numbers": np.random.default_rng(1),
        "legacy": np.random.RandomState(1),
        "torch": torch.Generator().manual_seed(1),
        "seen": {"count": 0, "list": [1], "tensor": torch.zeros(3)},
        "meter": Meter(),
    }


def use(made: dict[str, Any]) -> list[Any]:
    """Draw from and count in each of the objects; return what came out."""
    made["seen"]["count"] += 1
    made["seen"]["list"].append(2)
    made["seen"]["tensor"] += 1
    made["meter"].values.append(1.5)
    made["meter"].sum += 1
    return [
        made["noise"].random(),
        made["noise"].gauss(0, 1),
        made["numbers"].random(),
        made["legacy"].rand(),
        torch.rand(2, generator=made["torch"]).tolist(),
        repr(made["seen"]),
        repr(made["meter"].state_dict()),
    ]


def test_what_is_saved_within_a_step_is_of_its_beginning() -> None:
    """A step that is given up halfway is as if it had not begun, for every kind of object."""
    live = objects()
    use(live)
    tracked = adapters(live)
    shadow = ObjectShadow(tracked)
    shadow.take()
    expected = use(live)
    use(live)
    rank = Rank()
    rank.start()
    rank.saver.save_now(
        rank.saver.capture(1, CheckpointKind.EMERGENCY, shadow.over(tracked), {}, solo=True)
    )
    fresh = objects()
    next_attempt(rank.store, **fresh)

    assert use(fresh) == expected
    assert live["seen"]["count"] == 3, "the live objects go on as they are"


def test_each_boundary_replaces_the_one_before() -> None:
    """Only the last finished step counts."""
    live = objects()
    tracked = adapters(live)
    shadow = ObjectShadow(tracked, with_random=True)
    for _ in range(3):
        use(live)
        random.random()
        shadow.take()
    held = shadow.random_states
    assert held is not None
    random.setstate(held["python"])
    expected = random.random()
    use(live)
    rank = Rank()
    rank.start()
    rank.saver.save_now(
        rank.saver.capture(3, CheckpointKind.EMERGENCY, shadow.over(tracked), {}, solo=True)
    )
    fresh = objects()
    next_attempt(rank.store, **fresh)
    random.setstate(held["python"])

    assert fresh["seen"]["count"] == 3
    assert fresh["meter"].values == [1.5] * 3
    assert random.random() == expected


class _AnswersAll(dict[str, Any]):
    """A dict whose missing attributes have a value, as those of settings libraries."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name, {})


def test_a_dict_that_has_an_answer_to_any_name_is_a_dict() -> None:
    """What it says of names that it does not have is not asked for."""
    seen = _AnswersAll(count=1)
    tracked = adapters({"seen": seen})
    shadow = ObjectShadow(tracked)
    shadow.take()
    assert shadow.over(tracked)["seen"] is not tracked["seen"]
    assert seen == {"count": 1}


def test_weights_scalers_and_large_objects_are_not_copied_each_step() -> None:
    """What changes only with the weights needs no copy; what is huge would slow every step."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracked = adapters(
        {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
            "scaler": torch.amp.GradScaler("cpu"),
            "replay": {"frames": torch.zeros(2_000_000)},
            "seen": {"count": 1},
        }
    )
    shadow = ObjectShadow(tracked)
    shadow.take()
    over = shadow.over(tracked)

    assert {name for name in over if over[name] is not tracked[name]} == {"scheduler", "seen"}
    assert set(over) == set(tracked)


class Buffer:
    """A replay buffer of more than 4 MB; `quick` is what it may be asked for instead."""

    def __init__(self) -> None:
        self.rows = torch.zeros(2_000_000)
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        """Return live state."""
        return {"rows": self.rows, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.rows, self.count = state["rows"], state["count"]

    def add(self) -> None:
        """Do what a step does to it, before its weights change."""
        self.rows[self.count] = 1
        self.count += 1


class HeldBuffer(Buffer):
    """One that can say later what it was: its places beyond the count were empty."""

    def hold_state(self) -> Any:
        """Return what gives the state of this moment."""
        count = self.count

        def later() -> dict[str, Any]:
            rows = self.rows.clone()
            rows[count:] = 0
            return {"rows": rows, "count": count}

        return later


class Ring(Buffer):
    """One of arrays, whose writes nothing counts, beside the place of the next row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Any = np.zeros(2_000_000, np.float32)


def changes_seen(live: dict[str, Any], before: str = "", after: str = "", steps: int = 3) -> str:
    """Return what is told of objects that change before each optimizer's step, or after it."""
    told = list[str]()
    shadow = StepShadow.of(adapters(live), with_random=False, warn=told.append)
    shadow.take()
    for _ in range(steps):
        if before:
            live[before].add()
        shadow.look()
        shadow.look()  # of a second optimizer
        if after:
            live[after].add()
        shadow.take()
    return "\n".join(told)


@pytest.mark.parametrize("kind", [Buffer, Ring])
def test_a_large_object_that_changes_before_the_weights_is_told_of_once(kind: type[Buffer]) -> None:
    """A save within a step holds parts of that step: its owner hears of it, and of the way out."""
    told = changes_seen({"replay": kind(), "average": Buffer(), "seen": {}}, "replay", "average")

    assert told.startswith("replay changes before optimizer.step() and is not copied")
    assert "more than 4.2 MB" in told
    assert "hold_state()" in told
    assert "\n" not in told


def test_a_large_object_is_not_asked_for_its_state_for_ever() -> None:
    """It may be slow to give it; that no copy of it is taken is no news where nothing is wrong."""
    asked = list[int]()

    class Slow(Buffer):
        def state_dict(self) -> dict[str, Any]:
            asked.append(self.count)
            return {"rows": self.rows.clone(), "count": self.count}

    assert changes_seen({"average": Slow()}, after="average", steps=50) == ""
    assert max(asked) < 12


def test_a_large_object_that_holds_its_state_is_saved_as_at_the_boundary() -> None:
    """It is asked after each step, and for all of its state only if that is saved."""
    replay, told = HeldBuffer(), list[str]()
    tracked = adapters({"replay": replay})
    shadow = StepShadow.of(tracked, with_random=False, warn=told.append)
    replay.add()
    shadow.take()
    replay.add()
    rank = Rank()
    rank.start()
    objects = shadow.boundary(tracked)
    rank.saver.save_now(rank.saver.capture(1, CheckpointKind.EMERGENCY, objects, {}))
    fresh = Buffer()
    next_attempt(rank.store, replay=fresh)

    assert (fresh.count, float(fresh.rows.sum())) == (1, 1.0)
    assert told == []


def test_learning_rates_go_back_to_the_last_boundary() -> None:
    """A schedule that follows a metric moves them in the body, before the weights change."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    groups = GroupShadow([optimizer])
    groups.take()
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.param_groups[0]["momentum"] = 0.5
    groups.put_back()
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.1, 0.9)
    assert optimizer.param_groups[0]["params"] == list(model.parameters())


def test_a_rate_that_is_a_tensor_goes_back_too() -> None:
    """It is changed in place, as optimizers ask for that are to be captured or compiled."""
    rate = torch.tensor(0.1)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=rate)
    shadow = GroupShadow([optimizer])
    shadow.take()
    rate.fill_(0.01)
    shadow.put_back()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)


def saved_buffers(shadow: BufferShadow, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a save within a step holds."""
    leaves = [Leaf(name, buffer.detach()) for name, buffer in model.named_buffers()]
    return {leaf.name: leaf.tensor for leaf in shadow.over(leaves)}


def test_buffers_are_saved_as_at_the_last_boundary() -> None:
    """BatchNorm's statistics move in the forward pass, long before the weights.

    The script's own stay as they are: its thread may be in the midst of that pass.
    """
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    shadow = BufferShadow([model])
    model(torch.randn(5, 3))
    shadow.take()
    expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(torch.randn(5, 3))
    moved = {name: buffer.clone() for name, buffer in model.named_buffers()}
    saved = saved_buffers(shadow, model)
    shadow.take()

    for name, buffer in model.named_buffers():
        assert torch.equal(saved[name], expected[name])
        assert torch.equal(buffer, moved[name])
        assert not torch.equal(moved[name], expected[name])


def test_a_large_table_does_not_hide_the_statistics() -> None:
    """A mask of many megabytes is no statistic and not copied; what is small beside it, is."""
    model = nn.BatchNorm1d(3)
    model.register_buffer("table", torch.zeros(2_000_000))
    model.register_buffer("passing", torch.zeros(3), persistent=False)
    model.register_buffer("nothing", torch.zeros(0))
    shadow = BufferShadow([model])
    shadow.take()
    for buffer in model.buffers():
        buffer.add_(1)
    saved = saved_buffers(shadow, model)

    assert saved.pop("nothing").shape == (0,)
    assert {name: buffer.max().item() for name, buffer in saved.items()} == {
        "running_mean": 0, "running_var": 1, "num_batches_tracked": 0, "table": 1, "passing": 1
    }  # fmt: skip


def test_two_buffers_over_one_memory_are_each_saved_in_their_own_order() -> None:
    """A square table and its transpose lie in the same place, and are not the same values."""
    model = nn.Module()
    table = torch.arange(9.0).view(3, 3)
    model.register_buffer("table", table)
    model.register_buffer("turned", table.t())
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    shadow = BufferShadow([model])
    shadow.take()
    table.zero_()
    saved = saved_buffers(shadow, model)

    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[key], expected[key]) for key in expected)


def test_a_buffer_that_is_replaced_is_saved_as_it_was() -> None:
    """`self.mean = 0.9 * self.mean + ...` puts another tensor in the buffer's place."""
    model: Any = nn.Module()
    model.register_buffer("mean", torch.tensor(1.0))
    shadow = BufferShadow([model])
    shadow.take()
    model.mean = model.mean * 2

    assert saved_buffers(shadow, model)["mean"] == 1.0


def test_a_forward_pass_beside_a_late_save_changes_nothing_of_it() -> None:
    """The hash is of the very bytes that leave: the script's thread goes on with its step."""
    model = nn.BatchNorm1d(3)
    shadow = StepShadow.of(adapters({"m": model}), with_random=False)
    shadow.take()
    expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(torch.randn(5, 3))

    class Slow(MemoryStore):
        """A store to which the bytes go while the script trains on."""

        def put(self, key: str, data: Any, **how: Any) -> str:
            parts = []
            for part in data if key.endswith(".safetensors") else ():
                parts.append(part)  # the hash has seen it
                model(torch.randn(5, 3))
            return super().put(key, b"".join(map(bytes, parts)) if parts else data, **how)

    rank = Rank(Slow())
    rank.start()
    rank.saver.save_now(
        rank.saver.capture(
            1, CheckpointKind.EMERGENCY, adapters({"m": model}), {}, buffers=shadow.buffers
        )
    )
    fresh = nn.BatchNorm1d(3)
    next_attempt(rank.store, m=fresh)

    for name, buffer in fresh.named_buffers():
        assert torch.equal(buffer, expected[name]), name


def test_a_buffer_that_changes_its_shape_is_refused() -> None:
    """It could not be restored, and ranks could not agree on it: it is named at the next step."""
    model = nn.Module()
    model.register_buffer("memory", torch.zeros(2))
    shadow = BufferShadow([model])
    model.memory = torch.zeros(3)

    with pytest.raises(UsageError, match="buffer memory has another shape"):
        shadow.take()


def test_nothing_to_shadow_is_fine() -> None:
    """A script without buffers or objects costs nothing."""
    BufferShadow().take()
    assert BufferShadow().over([]) == []
    shadow = ObjectShadow()
    shadow.take()

    assert shadow.over({}) == {}
    assert shadow.random_states is None
