"""Data that are other ones at a resume: told by name, or refused where a stream is replayed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from spotguard.errors import UsageError
from spotguard.runtime.data.same_data import DataCheck, hash_of
from spotguard.runtime.state.tracked import tracked
from tests.runtime.data.test_loader import make as loader_of
from tests.runtime.data.test_sampling import Learning
from tests.runtime.data.test_streaming import make

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.runtime.harness.processes import Jobs


class Augmented:
    """A stream whose samples are augmented by the global generators, in a fixed order."""

    def __init__(self, order: Callable[[], list[int]], augments: bool = True) -> None:
        self.order = order
        self.augments = augments

    def __iter__(self) -> Iterator[Any]:
        for item in self.order():
            yield item + (float(torch.rand(())) if self.augments else 0.0)


def replayed(before: Any, after: Any, read: int, **over: Any) -> None:
    """Read some steps of three samples of one stream, and find the place again in another one."""
    first = make(before, replay=True, **over)
    for _ in first.read(0, read):
        pass
    first.keep(read)
    again = make(after, replay=True, **over)
    assert again.restore(None, {0: first.own}, 1) is None


@pytest.mark.parametrize("read", [1, 3, 40])
def test_a_stream_that_is_never_the_same_is_refused(read: int) -> None:
    """Resampled, unsorted or shuffled without a seed, and one with fewer samples; one whose samples
    are only augmented is the same."""
    fixed = list(range(500))
    shuffled = random.Random().sample(fixed, 500)
    replayed(Augmented(lambda: fixed), Augmented(lambda: fixed), read)
    for order in (shuffled, [*fixed[1:], 0]):
        with pytest.raises(UsageError, match="gives another sample as number") as refused:
            replayed(Augmented(lambda: fixed), Augmented(lambda order=order: order), read)  # type: ignore[misc]
        assert "resampled=False" in refused.value.hint
    with pytest.raises(UsageError, match="has only 2 samples of"):
        replayed(Augmented(lambda: fixed), Augmented(lambda: fixed[:2]), read)


def test_a_place_of_a_version_before_is_found_without_a_hash() -> None:
    """It kept none."""
    again = make(Augmented(lambda: list(range(9))), replay=True)
    state = {"0": {"passes": 0, "state": {"tree": {"read": 3}, "leaves": {}}}}
    first = make(Augmented(lambda: list(range(9))), replay=True)
    for _ in first.read(0, 1):
        pass
    first.keep(1)
    state = first.own
    del state["0"]["state"]["tree"]["hashes"]
    assert again.restore(None, {0: state}, 1) is None


class ResampledShards:
    """As webdataset's, by name."""

    deterministic = False


def test_a_resampled_pipeline_is_refused_at_once() -> None:
    """Before any step is paid for; not where it is said to be deterministic."""
    stream: Any = Augmented(lambda: [1, 2, 3])
    stream.pipeline = [ResampledShards(), object()]
    with pytest.raises(UsageError, match="another one in each attempt"):
        make(stream, replay=True)
    stream.pipeline[0].deterministic = True
    make(stream, replay=True)


def test_what_a_sample_is_hashed_by() -> None:
    """Numbers, text, tensors and arrays, in containers; webdataset's key alone, not its paths."""
    numpy = pytest.importorskip("numpy")
    image = torch.arange(30_000.0).view(3, 100, 100)
    samples = [1, "a", b"a", 1.0, [1, {"x": image}], numpy.arange(5), {"k": image[:, ::2]}]
    hashes = [hash_of(sample) for sample in samples]
    assert len({*hashes}) == len(hashes)
    assert hashes == [hash_of(sample) for sample in samples]
    changed = image.clone()
    changed[-1, -1, -1] = 7
    assert hash_of([1, {"x": changed}]) != hashes[4]
    with_key = {"__key__": "a/1", "__local_path__": "/tmp/x", "jpg": image}
    assert hash_of(with_key) == hash_of({"__key__": "a/1", "__local_path__": "/tmp/y"})
    assert hash_of(object()) is None


@pytest.mark.parametrize("workers", [0, 2])
def test_changed_data_are_told_by_name(workers: int) -> None:
    """A data set whose files changed gives other samples at the place that was read last. What the
    attempt trains on is what it would be without the comparison."""

    class Files(torch.utils.data.Dataset[Any]):
        def __init__(self, add: float = 0.0) -> None:
            self.add, self.seen = add, {"reads": 0}

        def __len__(self) -> int:
            return 60

        def __getitem__(self, index: int) -> Any:
            self.seen["reads"] += 1
            return torch.rand(3) + index + self.add

    def check(data: Any, told: Any, said: list[str]) -> tuple[Any, DataCheck]:
        loader = loader_of(data, num_workers=workers)
        check = DataCheck.of(loader, {"seen": tracked("seen", data.seen)}, told, may=True)
        assert check is not None
        first = 0 if told is None else 3
        batches = loader.read(first, 6)
        return [b for _, b in check.begin(batches, tell=said.append)], check

    said: list[str] = []
    whole, before = check(Files(), None, said)
    kept = before.counters()
    assert kept is not None
    assert (kept["step"], len(kept["samples"])) == (0, 2)
    rest, _ = check(Files(), kept, said)
    assert said == []
    assert torch.equal(torch.stack(rest), torch.stack(whole[-len(rest) :]))
    check(Files(0.5), kept, said)
    assert len(said) == 1
    assert said[0].startswith("Files gives other data than before: samples ")


def test_what_the_script_changes_in_place_is_not_compared() -> None:
    """Nor what comes from a tracked generator, nor what is cut otherwise today."""
    loader = loader_of(torch.arange(60.0).view(60, 1))
    check = DataCheck.of(loader, {}, None, may=True)
    assert check is not None
    for _, batch in check.begin(loader.read(0, 1), tell=print):
        batch *= 2
    assert check.counters() is None
    drawn = {"noise": tracked("noise", torch.Generator())}
    assert DataCheck.of(loader, drawn, None, may=True) is None
    assert check.again({"step": 0, "samples": [1, 2], "hash": "x"}) is None


SCRIPT = """
import os, torch
import torch.distributed as dist
import spotguard.runtime as spotguard

run = spotguard.init(backend="gloo", save_every="2 steps")
add = float(os.environ.get("ADD", "0"))
data = torch.utils.data.TensorDataset(torch.randn(60, 3) + add, torch.randn(60, 1))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(
    torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run.track(model=model, optimizer=optimizer)
loader = run.loader(data, global_batch_size=12, micro_batch_size=2)
for step in run.steps(loader, total=4 * run.attempt):
    for x, y in step:
        features = model(x)
        if os.environ.get("CONTRAST"):
            others = [torch.empty_like(features) for _ in range(run.world_size)]
            dist.all_gather(others, features.detach())
        step.backward(features.pow(2).mean())
    seen = torch.ones(())
    dist.all_reduce(seen)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.e2e
def test_a_job_says_that_data_or_ranks_are_not_what_they_were(jobs: Jobs) -> None:
    """Changed data and a loss over all ranks are told at the resume on three ranks after two; a
    script whose own collectives come after the backward pass hears nothing of them."""
    script = jobs.folder / "script.py"
    script.write_text(SCRIPT)

    def ranks(world: int, attempt: int, **env: Any) -> str:
        started = jobs.start_ranks(world, script=script, SPOTGUARD_ATTEMPT=attempt, **env)
        assert [job.wait() for job in started] == [0] * world, started[0].said
        return started[0].said

    said = ranks(2, 1, CONTRAST=1)
    assert "all_gather" not in said, "nothing has changed yet"
    said = ranks(3, 2, ADD=1, CONTRAST=1)
    assert said.count("TensorDataset gives other data than before") == 1
    assert said.count("the script calls all_gather between a micro-batch and its") == 1
    said = ranks(2, 3, ADD=1)
    assert "gives other data" not in said
    assert "the script calls" not in said


def test_a_sampler_with_a_state_is_not_asked_for_an_epoch_that_is_over() -> None:
    """Looking whether data are the same moves no order: a resume at an epoch's beginning has the
    next epoch's own, and the one after that, too."""

    def made() -> Any:
        sampler = Learning(18)
        return loader_of(size=18, sampler=sampler, global_batch_size=6, micro_batch_size=2)

    undisturbed = made()
    steps = [list(undisturbed.read(step, step + 1)) for step in range(9)]
    first = made()
    check = DataCheck.of(first, {}, None, may=True)
    assert check is not None
    for _ in check.watch(first.read(0, 3)):
        pass
    first.keep(3)
    told = {"step": 2, "samples": [*first.shares(2)[0].indices], "hash": "of the batch"}
    resumed = made()
    resumed.restore(first.shared, {}, 1)
    DataCheck.of(resumed, {}, told, may=True)
    assert resumed.again == []
    for step in range(3, 9):
        found = [share.indices for share, _ in resumed.read(step, step + 1)]
        assert found == [share.indices for share, _ in steps[step]], step
