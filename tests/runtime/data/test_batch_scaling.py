from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spotguard.checkpoint.lineage import restorable
from spotguard.errors import UsageError
from spotguard.events import keys
from spotguard.runtime.data.batch_scaling import (
    LearningRateScale,
    ScaledElasticLoader,
    learning_rate_scale,
)
from spotguard.testing import read_sample_trace
from tests.runtime.data.test_loader import PLAIN, Numbers, make, trained
from tests.runtime.data.test_sampling import Learning

if TYPE_CHECKING:
    from spotguard.events.event import Event
    from tests.runtime.harness.processes import Job, Jobs

# ---------------------------------------------------------------------- the rate


def scale_of(rule: str = "linear", *, reference: Any = 1, warmup: Any = 0) -> LearningRateScale:
    """Return a scale of learning rates."""
    return LearningRateScale(rule, reference=reference, warmup_steps=warmup)


class Training:
    """A weight whose gradient is always 1, so that it falls by the rate at each step."""

    def __init__(self, scale: LearningRateScale, rate: float | torch.Tensor = 1.0) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.weight.grad = torch.ones_like(self.weight)
        self.optimizer = torch.optim.SGD([self.weight], lr=rate)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.number = 0
        scale.attach([self.optimizer], lambda: self.number)

    def step(self) -> float:
        """Return by how much the weight fell."""
        before = self.weight.item()
        self.optimizer.step()
        self.number += 1
        return before - self.weight.item()


@pytest.mark.parametrize(("rule", "factor"), [("linear", 2.25), ("sqrt", 1.5)])
def test_the_rate_follows_the_ranks(rule: str, factor: float) -> None:
    """Nine ranks with a rate for four: in proportion, or by the root."""
    scale = scale_of(rule, reference=4)
    assert scale.begin(9, 0)
    assert Training(scale).step() == pytest.approx(factor)


def test_the_reference_changes_nothing() -> None:
    """On as many ranks as the rate is for, there is nothing to say."""
    scale = scale_of(reference=4, warmup=10)
    assert not scale.begin(4, 0)
    assert Training(scale).step() == 1.0


def test_the_change_is_spread_over_the_warmup() -> None:
    """From the factor before to the new one, in equal steps, and then it stays."""
    scale = scale_of(reference=2, warmup=4)
    scale.begin(6, 0)
    training = Training(scale)
    assert [training.step() for _ in range(6)] == pytest.approx([1, 1.5, 2, 2.5, 3, 3])


def test_a_run_that_is_over_leaves_the_rate_alone() -> None:
    """The script's optimizer steps by its own rate again."""
    scale = scale_of()
    scale.begin(3, 0)
    training = Training(scale)
    assert training.step() == 3.0
    scale.detach()
    assert training.step() == 1.0


@pytest.mark.parametrize("rate", [1.0, torch.tensor(1.0, dtype=torch.float64)], ids=type)
def test_the_schedule_does_not_notice(rate: float | torch.Tensor) -> None:
    """Schedulers and checkpoints see the script's own rate; a factor never piles up."""
    scale = scale_of()
    scale.begin(3, 0)
    training = Training(scale, rate)
    for expected in (1.0, 0.5, 0.25):
        assert float(training.optimizer.state_dict()["param_groups"][0]["lr"]) == expected
        assert training.step() == pytest.approx(3 * expected)
        training.scheduler.step()


def test_a_resume_goes_on_with_the_warmup() -> None:
    """On as many ranks: at the same factor. On others: from the factor that was reached."""
    first = scale_of(reference=2, warmup=4)
    first.begin(6, 10)
    state = json.loads(json.dumps(first.state()))

    same = scale_of(reference=2, warmup=4)
    same.restore(state)
    assert not same.begin(6, 12)
    assert [same.factor(step) for step in (12, 13, 14, 20)] == [2, 2.5, 3, 3]

    fewer = scale_of(reference=2, warmup=4)
    fewer.restore(state)
    assert fewer.begin(2, 12)
    assert [fewer.factor(step) for step in (12, 13, 14, 16)] == [2, 1.75, 1.5, 1]


# ---------------------------------------------------------------------- the batches


def scaled(world: int, *, size: int = 0, reference: int = 1, **over: Any) -> list[Any]:
    """Return the loaders of all ranks; by default each rank has two micro-batches of 2."""
    warmup = over.pop("warmup", 0)
    sampler = over.pop("sampler", lambda: None)
    arguments = PLAIN | {"global_batch_size": 4 * reference} | over
    return [
        ScaledElasticLoader(
            Numbers(size),
            scale=scale_of(reference=reference, warmup=warmup),
            rank=rank,
            world_size=world,
            sampler=sampler(),
            **arguments,
        )
        for rank in range(world)
    ]


def resumed(world: int, saved: Any, step: int, **over: Any) -> list[Any]:
    """Return the loaders of an attempt that begins at `step` with what was saved, if anything."""
    loaders = scaled(world, **over)
    for loader in loaders:
        if saved is not None:
            assert loader.restore(json.loads(saved), {}, 1) is None
        loader.begin(step)
        loader.keep(step)
    return loaders


MOST = 7
LIVES = st.lists(
    st.tuples(
        st.integers(min_value=1, max_value=MOST),
        st.integers(min_value=0, max_value=12),
        st.integers(min_value=0, max_value=3),
    ),
    max_size=7,
)
"""Ranks, steps until it ends, and how many of these are lost."""


@pytest.mark.slow
@pytest.mark.same_everywhere
@settings(max_examples=300)
@given(
    size=st.integers(min_value=1, max_value=150),
    reference=st.integers(min_value=1, max_value=4),
    micro_batches=st.integers(min_value=1, max_value=3),
    micro_batch=st.integers(min_value=1, max_value=5),
    drop_last=st.booleans(),
    lives=LIVES,
    last_world=st.integers(min_value=1, max_value=MOST),
)
def test_every_epoch_reads_each_sample_exactly_once(
    size: int,
    reference: int,
    micro_batches: int,
    micro_batch: int,
    drop_last: bool,
    lives: list[tuple[int, int, int]],
    last_world: int,
) -> None:
    """Two epochs in the order of any run, though each number of ranks has a batch of its own.

    Steps that an attempt had done after its last save are lost. The weights of a step add up to 1,
    no two micro-batches have one seed, and all but the last batch of an epoch are full. With
    `drop_last`, less than one global batch is left out.
    """
    each = micro_batches * micro_batch
    over: dict[str, Any] = {
        "size": size + MOST * each if drop_last else size,
        "reference": reference,
        "global_batch_size": each * reference,
        "micro_batch_size": micro_batch,
        "drop_last": drop_last,
    }
    read: list[tuple[int, list[int]]] = []
    sizes: list[int] = []
    seeds: list[set[tuple[int, int]]] = []
    saved = None
    for world, steps, lost in [*lives, (last_world, 1000, 0)]:
        loaders = resumed(world, saved, len(read), **over)
        begun, until = len(read), min(len(read) + steps, loaders[0].first_step_of(2))
        for step in range(begun, until):
            shares = [share for loader in loaders for share in loader.shares(step)]
            assert sum(share.weight for share in shares) == pytest.approx(1, abs=1e-12)
            seeds.append({(share.step, share.number) for share in shares if share.weight})
            assert len(seeds[-1]) == sum(share.weight > 0 for share in shares)
            assert {loader.epoch_of(step) for loader in loaders} == {loaders[0].epoch_of(step)}
            read.append((loaders[0].epoch_of(step), trained(loaders, step)))
            sizes.append(each * world)
        del read[max(begun, until - lost) :], sizes[max(begun, until - lost) :]
        del seeds[max(begun, until - lost) :]
        for loader in loaders:
            loader.keep(len(read))
        [saved] = {json.dumps(loader.shared) for loader in loaders}

    order = make(Numbers(over["size"]), global_batch_size=1)._sampling.order
    for epoch in range(2):
        samples = [sample for e, batch in read if e == epoch for sample in batch]
        assert samples == [order(epoch)[place] for place in range(len(samples))]
        last = max(step for step, (e, _) in enumerate(read) if e == epoch)
        left_out = over["size"] - len(samples)
        assert left_out < MOST * each if drop_last else left_out == 0
        for step, (e, batch) in enumerate(read):
            if e == epoch and (step != last or drop_last):
                assert len(batch) == sizes[step]
    assert sum(map(len, seeds)) == len(set().union(*seeds)), "two micro-batches share a seed"


def test_samplers_are_cut_anew_too() -> None:
    """A sampler with a state draws its epoch again in the next attempt, which goes on in it."""
    over: dict[str, Any] = {"size": 30, "sampler": lambda: Learning(30)}
    [alone] = resumed(1, None, 0, **over)
    aim = [trained([alone], step) for step in range(16)]
    alone.keep(9)  # one of the second epoch's steps is done

    three = resumed(3, json.dumps(alone.shared), 9, **over)
    rest = [trained(three, step) for step in range(9, three[0].first_step_of(2))]
    assert list(map(len, rest)) == [12, 12, 2]
    assert [i for batch in rest for i in batch] == [i for batch in aim[9:] for i in batch]


def test_as_many_ranks_cut_the_same_batches() -> None:
    """An interruption alone changes nothing: neither the batches nor the end."""
    [aim] = resumed(1, None, 0, size=23)
    [again] = resumed(1, json.dumps(aim.shared), 4, size=23)
    assert [again.shares(step) for step in range(4, 15)] == [
        aim.shares(step) for step in range(4, 15)
    ]
    assert again.first_step_of(2) == aim.first_step_of(2) == 12


def test_what_changes_is_told() -> None:
    """Batch and rate before and after, once; as many ranks as before are nothing to tell."""
    [alone] = scaled(1, size=40, reference=2, warmup=10)
    assert alone.begin(0)["message"] == (
        "global batch 8 → 4, learning rate times 0.5 instead of 1, over 10 steps"
    )
    alone.keep(0)
    [again] = scaled(1, size=40, reference=2, warmup=10)
    again.restore(alone.shared, {}, 1)
    assert again.begin(5) is None

    again.keep(5)
    later = scaled(3, size=40, reference=2, warmup=10)[0]
    later.restore(again.shared, {}, 1)
    assert later.begin(5) == {
        "step": 5,
        "global_batch_size": 12,
        "global_batch_size_before": 4,
        "lr_factor": 1.5,
        "lr_factor_before": 0.75,
        "lr_warmup_steps": 10,
        "message": "global batch 4 → 12, learning rate times 1.5 instead of 0.75, over 10 steps",
    }


def test_identity_holds_the_reference_not_the_ranks() -> None:
    """Another rule, reference or batch is another run; another number of ranks is not."""
    [one] = scaled(1, size=40)
    assert {str(loader.identity()) for loader in scaled(3, size=40)} == {str(one.identity())}
    assert scaled(1, size=40, reference=2)[0].identity() != one.identity()
    assert scaled(1, size=40, global_batch_size=6)[0].identity() != one.identity()
    assert make(Numbers(40)).identity() != one.identity()


def test_without_a_micro_batch_size_a_rank_has_one_micro_batch() -> None:
    """So that any number of ranks has the same ones."""
    loaders = scaled(3, size=40, reference=2, micro_batch_size=None)
    assert [[len(s.indices) for s in loader.shares(0)] for loader in loaders] == [[4], [4], [4]]


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"reference": 3, "global_batch_size": 8}, "global_batch_size is 8, which is not a whole"),
        ({"reference": 2, "global_batch_size": 6}, "micro-batches for each of the 2 ranks"),
        ({"reference": 8, "global_batch_size": 4}, "for each of the 8 ranks"),
        ({"global_batch_size": 0}, "global_batch_size is 0"),
        ({"micro_batch_size": 1.5}, "micro_batch_size is 1.5"),
        ({"drop_last": True, "size": 3}, "too few for one global batch"),
    ],
)
def test_batches_that_do_not_divide_are_refused(over: dict[str, Any], message: str) -> None:
    """Before training, and on every number of ranks: not when a node has come or gone."""
    with pytest.raises(UsageError, match=message):
        scaled(1, **({"size": 40} | over))


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"rule": "cubic"}, "lr_scaling is 'cubic'; allowed: linear, sqrt"),
        ({"reference": None}, "reference_world_size is None"),
        ({"reference": 0}, "reference_world_size is 0, but lr_scaling needs a whole number from 1"),
        ({"reference": True}, "reference_world_size is True"),
        ({"warmup_steps": -1}, "lr_warmup_steps is -1, but lr_scaling needs a whole number from 0"),
        ({"stream": True}, "a stream cannot be cut anew"),
        ({"bitwise": True}, 'lr_scaling and exact="bitwise" exclude each other'),
        ({"rule": None}, "say nothing without lr_scaling"),
        ({"rule": None, "reference": None, "warmup_steps": 1}, "say nothing without lr_scaling"),
    ],
)
def test_what_makes_no_sense_is_named(over: dict[str, Any], message: str) -> None:
    """One sentence that names the argument."""
    arguments: dict[str, Any] = {
        "rule": "linear", "reference": 2, "warmup_steps": None, "stream": False, "bitwise": False,
    }  # fmt: skip
    with pytest.raises(UsageError, match=message):
        learning_rate_scale(**(arguments | over))


def test_nothing_asked_for_is_nothing_scaled() -> None:
    """Streams and bitwise mode go on as ever without it; its warm-up takes 100 steps by default."""
    nothing = learning_rate_scale(
        None, reference=None, warmup_steps=None, stream=True, bitwise=True
    )
    assert nothing is None
    scale = learning_rate_scale("sqrt", reference=2, warmup_steps=None, stream=False, bitwise=False)
    assert scale is not None
    assert scale.warmup_steps == 100


# ---------------------------------------------------------------------- real processes

SCALED = Path(__file__).parents[1] / "jobs" / "scaled.py"


def attempt(jobs: Jobs, world: int, code: int, **env: Any) -> list[Job]:
    """Run one attempt to its end; check how its ranks ended."""
    ranks = jobs.start_ranks(world, script=SCALED, **env)
    assert [job.wait() for job in ranks] == [code] * world, "\n".join(job.said for job in ranks)
    return ranks


@pytest.mark.e2e
def test_a_run_whose_batch_follows_the_ranks(jobs: Jobs) -> None:
    """1, 3, then 2 ranks, told to stop in mid-epoch: each sample once, and the rate that it needs.

    The rates that the optimizer stepped with go linearly to the new factor from the one that was
    reached; the script's own schedule goes on beside them. The history tells each change.
    """
    trace = jobs.folder / "trace"
    lives = [
        attempt(jobs, 1, 75, HURT="4:0", SPOTGUARD_TRACE_SAMPLES=trace),
        attempt(jobs, 3, 75, HURT="9:2", SPOTGUARD_TRACE_SAMPLES=trace),
        attempt(jobs, 2, 0, SPOTGUARD_TRACE_SAMPLES=trace),
    ]
    steps = read_sample_trace(trace)
    assert [step.step for step in steps] == list(range(len(steps)))
    for epoch in range(3):
        samples = Counter(i for step in steps if step.epoch == epoch for i in step.samples)
        assert samples == Counter(range(50))

    ends_of_epochs = [max(s.step for s in steps if s.epoch == e) for e in range(3)]
    full = [step for step in steps if step.step not in ends_of_epochs]
    assert {(step.world_size, len(step.samples)) for step in full} == {(1, 4), (2, 8), (3, 12)}

    told = [event for event in jobs.events() if event.kind == "rescaled"]
    assert [event.data["global_batch_size"] for event in told] == [4, 12, 8]
    assert [event.data["lr_factor"] for event in told] == [0.5, 1.5, 1.0]
    assert told[1].data["lr_factor_before"] == pytest.approx(0.5)
    expected = {step: 0.9**step * factor for step, factor in factors(told, len(steps)).items()}
    for ranks in lives:
        for job in ranks:
            rates = rates_in(job.said)
            assert rates
            assert rates == pytest.approx({step: expected[step] for step in rates})
    totals = [e.data["total_steps"] for e in jobs.events() if e.kind == "started"]
    assert totals[0] == 3 * 13
    assert totals[-1] == len(steps)


def factors(told: list[Event], steps: int) -> dict[int, float]:
    """Return the factor of each step by what the history tells."""
    found = {}
    for event in told:
        data = event.data
        for step in range(data["step"], steps):
            share = min(1.0, (step - data["step"]) / data["lr_warmup_steps"])
            before, after = data["lr_factor_before"], data["lr_factor"]
            found[step] = before + (after - before) * share
    return found


def rates_in(said: str) -> dict[int, float]:
    """Return the rate that the optimizer stepped with at each step."""
    lines = [line.split() for line in said.splitlines() if line.startswith("rate ")]
    return {int(step): float(rate) for _, step, rate in lines}


BY_EPOCHS = """
import os, signal, time
import torch
import spotguard.runtime as spotguard

run = spotguard.init(save_every="100 steps")
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
run.track(model=model, optimizer=optimizer, scheduler=scheduler)
loader = run.loader(torch.randn(20, 8), global_batch_size=4, drop_last=True, lr_scaling="linear",
                    reference_world_size=1)
hurt = "HURT" in os.environ
for epoch in run.epochs(loader, total=int(os.environ.get("EPOCHS", "2"))):
    for step in epoch:
        for x in step:
            step.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    for batch in run.evaluate(range(1000)):
        if hurt:
            if batch == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        elif batch == 3:
            break
    scheduler.step()
    print(f"epoch {epoch.number} has ended, {len(epoch)} steps, {scheduler.get_last_lr()[0]}")
"""


@pytest.mark.e2e
def test_an_epoch_whose_rest_is_left_out_has_its_end(jobs: Jobs) -> None:
    """4 of its 20 samples are left, and a batch has 8 by now: its end comes all the same, once.

    It comes again where it is interrupted; and once it has come, it does not come again.
    """
    script = jobs.folder / "epochs.py"
    script.write_text(BY_EPOCHS)
    said = []
    ends: list[dict[str, Any]] = [
        {"SPOTGUARD_UNTIL_STEP": 4},
        {"HURT": 1},
        {"SPOTGUARD_UNTIL_STEP": 5},
        {},
    ]
    for world, end in zip((1, 2, 2, 2), ends, strict=True):
        ranks = jobs.start_ranks(world, script=script, **end)
        assert [job.wait() for job in ranks] == [75 if end else 0] * world, ranks[0].said
        said.append([line for line in ranks[0].said.splitlines() if line.startswith("epoch")])
    assert said == [
        [],
        [],
        ["epoch 0 has ended, 0 steps, 0.5"],
        ["epoch 1 has ended, 1 steps, 0.25"],
    ]


@pytest.mark.e2e
def test_what_such_an_end_changes_is_saved_where_it_is_the_last_one(jobs: Jobs) -> None:
    """No step was done, and yet the state is another one: the schedule's, a best value."""
    script = jobs.folder / "epochs.py"
    script.write_text(BY_EPOCHS)
    first = jobs.start_ranks(1, script=script, EPOCHS=1, SPOTGUARD_UNTIL_STEP=4)
    assert [job.wait() for job in first] == [75], first[0].said
    last = jobs.start_ranks(2, script=script, EPOCHS=1)
    assert [job.wait() for job in last] == [0, 0], last[0].said
    assert next(restorable(jobs.store())).prefix == keys.checkpoint(4, 2)


@pytest.mark.e2e
def test_a_resume_with_another_reference_is_refused(jobs: Jobs) -> None:
    """The script's rate and batch would be for something else than before."""
    attempt(jobs, 1, 75, HURT="4:0")
    job = jobs.start(SCALED, REFERENCE=1)
    assert job.wait() not in (0, 75)
    assert "reference_world_size was 2 and is 1" in job.said
