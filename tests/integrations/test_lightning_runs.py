"""Whole runs of a Lightning script with our callback: interrupted anywhere, on changing ranks."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integrations.preloaded import Stories, Story, same, stories

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("lightning")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]  # the first one loads the framework
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_fabric.py"
STEPS_PER_EPOCH = 7  # of 50 samples in batches of 4 on 2 ranks


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stories]:
    """Runs of the script, forked from a process that has Lightning loaded."""
    yield from stories(
        tmp_path_factory.mktemp("lightning"),
        "lightning_job.py",
        *("lightning.pytorch", "lightning.pytorch.strategies"),
    )


@pytest.fixture(scope="module")
def calm(lightning: Stories) -> Story:
    """The run on two ranks that nobody disturbs."""
    return lightning.tell([2])


def test_interrupted_anywhere_it_is_the_same_run(lightning: Stories, calm: Story) -> None:
    """In an epoch, in a validation, at an epoch's end: to the bit, with all that happens once.

    Weights, rates, counts of callbacks and of the data module are those of the calm run, the ends
    of epochs come once each, and only the validation that was cut begins anew.
    """
    words = ["step 2 ", f"validating after {STEPS_PER_EPOCH}", "epoch 0 ends", "step 9 "]
    story = lightning.tell([2] * 5, words)

    assert story.ends == calm.ends
    assert same(story, calm)
    assert story.samples() == calm.samples()
    again = [line for line in set(story.told) if story.told.count(line) != calm.told.count(line)]
    assert set(again) <= {f"validating after {STEPS_PER_EPOCH}", "validating after 0"}


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_schedule_that_follows_a_metric(lightning: Stories, interval: str) -> None:
    """Interrupted in an epoch and in its validation, it is stepped at each epoch's end, once.

    So it is where the run had ended in its second epoch, by `max_steps`, and is given more.
    """
    how: dict[str, Any] = {"MODEL": "following", "INTERVAL": interval, "EPOCHS": 4}
    calm = lightning.tell([1], **how)
    words: dict[str, list[Any]] = {
        "epoch": ["step 2 ", "validating after 13"],
        "step": [{"STEPS": 15}, "validating after 26"],
    }
    story = lightning.tell([1] * 3, words[interval], **how)

    assert any(line.startswith("best followed 4 ") for line in calm.ends), "once an epoch"
    assert story.ends == calm.ends
    assert same(story, calm)


def test_other_ranks_train_on_the_same_samples(lightning: Stories) -> None:
    """4, 1, then 3 ranks in mid-epoch, with 4 micro-batches on one rank, then uneven shares.

    Also where the script shares out its batch over the ranks of each attempt.
    """
    calm = lightning.tell([4])
    story = lightning.tell([4, 1, 3], ["step 2 ", "step 6 "], TEMPLATE=1)

    assert story.samples() == calm.samples()
    epoch = [sample for step in range(4) for sample in story.samples()[step]]
    assert sorted(epoch) == list(range(50))
    assert same(story, calm, within=1e-6)
    assert story.ends[0] == calm.ends[0]
    mean = mean_loss(calm)
    assert mean_loss(story) == pytest.approx(mean, rel=1e-5), "what comes again is in no mean"


def mean_loss(story: Story) -> float:
    """The mean loss that was logged for the last epoch."""
    [line] = [x for x in story.attempts[-1][0].said.splitlines() if x.startswith("mean")]
    return float(line.removeprefix("mean"))


def test_optimizers_that_are_stepped_by_hand(lightning: Stories) -> None:
    """An adversarial pair on 3 ranks is the same to the bit; on 2 it trains on the same samples."""
    calm = lightning.tell([3], MODEL="adversarial")
    story = lightning.tell([3, 3], ["step 4 "], MODEL="adversarial")
    smaller = lightning.tell([3, 2], ["step 4 "], MODEL="adversarial")

    assert same(story, calm)
    assert story.ends == calm.ends
    assert smaller.samples() == calm.samples()
    assert smaller.ends[0] == calm.ends[0]


def test_a_scaler_and_accumulated_batches(lightning: Stories) -> None:
    """fp16 with its scaler to the bit; 3 batches that were to be accumulated on 2 ranks, on 1."""
    half: dict[str, Any] = {"PRECISION": "16-mixed", "EPOCHS": 2}
    story, calm = lightning.tell([2, 2], ["step 9 "], **half), lightning.tell([2], **half)
    assert same(story, calm)
    assert story.ends == calm.ends

    steps: dict[str, Any] = {"ACCUMULATE": 3, "STEPS": 6}
    story, calm = lightning.tell([2, 1], ["step 3 "], **steps), lightning.tell([2], **steps)
    assert same(story, calm, within=1e-6)
    assert story.samples() == calm.samples()


def test_a_killed_rank(lightning: Stories, calm: Story) -> None:
    """kill -9 of one rank: the other leaves, saved, and the run goes on from there."""
    jobs = lightning.jobs()
    ranks = lightning.start(jobs, 2, PACE_S=0.1, SPOTGUARD_SAVE_EVERY="1000 steps")
    ranks[1].wait_for("step 4 ")
    ranks[1].kill(signal.SIGKILL)
    assert [rank.wait() for rank in ranks] == [75, -9], ranks[0].said
    [end] = jobs.ends()
    assert end["reason"] == "node_lost"
    assert end["step"] >= 3

    last = lightning.start(jobs, 2, 2)
    assert [rank.wait() for rank in last] == [0, 0], last[0].said
    assert [line for line in last[0].said.splitlines() if line.startswith("done")] == calm.ends[:1]


def test_a_run_that_stops_by_itself(lightning: Stories) -> None:
    """EarlyStopping counts over interruptions; a further attempt finds nothing left to do.

    One that is given more epochs trains on, until EarlyStopping stops it again.
    """
    early: dict[str, Any] = {"PATIENCE": 2, "MIN_DELTA": 1000, "EPOCHS": 9}
    calm = lightning.tell([2], **early)
    jobs = lightning.jobs()
    ends = []
    for attempt, word in enumerate(("epoch 0 ends", "step 18 ", None, None), 1):
        ranks = lightning.start(jobs, 2, attempt, **early, **({"PACE_S": 0.15} if word else {}))
        if word:
            ranks[0].wait_for(word)
            ranks[0].kill(signal.SIGTERM)
        assert [rank.wait() for rank in ranks] == [75 if word else 0] * 2, ranks[0].said
        ends.append([line for line in ranks[0].said.splitlines() if line.startswith("done")])

    assert calm.ends[0].startswith(f"done {3 * STEPS_PER_EPOCH} 3 ")
    assert ends == [[], [], calm.ends[:1], calm.ends[:1]]
    assert same(Story(jobs.folder, []), calm)
    more = lightning.start(jobs, 2, 5, **{**early, "EPOCHS": 12})
    assert [rank.wait() for rank in more] == [0, 0], more[0].said
    assert f"done {4 * STEPS_PER_EPOCH} 4 " in more[0].said


def test_an_epoch_that_is_cut_has_no_end(lightning: Stories, calm: Story) -> None:
    """Where steps end in mid-epoch, as in a drill, no callback looks for what was not validated.

    A further attempt goes on from there, and comes to the end that it would have come to.
    """
    jobs = lightning.jobs()
    attempts = []
    for attempt, until in enumerate((3, 100), 1):
        attempts.append(lightning.start(jobs, 2, attempt, SPOTGUARD_MAX_STEPS=until))
        assert [rank.wait() for rank in attempts[-1]] == [0, 0], attempts[-1][0].said
    story = Story(jobs.folder, attempts)

    assert story.ends == calm.ends
    assert same(story, calm)
    ends = [line for line in story.told if line.startswith("epoch 0 ends")]
    assert ends == [f"epoch 0 ends at {STEPS_PER_EPOCH}"]


def test_a_validation_of_its_own_is_not_part_of_the_run(lightning: Stories, calm: Story) -> None:
    """`Trainer.validate` before the fit and after it changes nothing, and sees what was trained."""
    story = lightning.tell([2, 2], ["step 9 "], VALIDATE=1)
    said = [ranks[0].said.splitlines() for ranks in story.attempts]
    found = [line for lines in said for line in lines if line.startswith(("before", "after"))]

    assert same(story, calm)
    assert story.ends == calm.ends
    assert story.samples() == calm.samples()
    assert [line.split()[0] for line in found] == ["before", "before", "after"]
    assert found[0].removeprefix("before") == found[1].removeprefix("before")
    assert found[2].removeprefix("after") != found[0].removeprefix("before")


def test_fabric_by_the_plain_api(lightning: Stories, tmp_path: Path) -> None:
    """The example's loop on 3 ranks, then 1: the same samples and loss as on 2."""
    fabric = lightning.of(EXAMPLE, tmp_path)
    calm = fabric.tell([2])
    jobs = fabric.jobs()
    said = []
    for attempt, (world, until) in enumerate(((3, 31), (1, 0)), 1):
        ranks = fabric.start(
            jobs, world, attempt, **({"SPOTGUARD_MAX_STEPS": until} if until else {})
        )
        assert [rank.wait() for rank in ranks] == [0] * world, ranks[0].said
        said += [line for line in ranks[0].said.splitlines() if line.startswith("step ")]

    assert Story(jobs.folder, []).samples() == calm.samples()
    assert losses(said) == pytest.approx(losses(calm.told), rel=1e-5)


def losses(said: list[str]) -> dict[int, float]:
    """The loss of each step that a rank printed.

    Another number of ranks adds up the same gradients in another order: the last digits may differ.
    """
    found = re.findall(r"^step (\d+) loss ([\d.]+)$", "\n".join(said), re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"CKPT": "some.ckpt"}, "leave ckpt_path out"),
        ({"MODEL": "reloading"}, "reload_dataloaders_every_n_epochs may change the data"),
        ({"MODEL": "combined"}, "the training data is a CombinedLoader of 2 loaders"),
        ({"MODEL": "silent"}, "0 * loss where one shall not count"),
        ({"MODEL": "two"}, "the training data is a list of 2 loaders"),
        ({"CALLBACK": "LearningRateFinder"}, "by steps that are none of the run's"),
        ({"CALLBACK": "StochasticWeightAveraging"}, "lightning.pytorch.callbacks.WeightAveraging"),
    ],
)
def test_what_cannot_hold_is_one_sentence(
    lightning: Stories, env: dict[str, Any], sentence: str
) -> None:
    """What would break a promise is refused with the way out, and exit code 2."""
    import torch

    jobs = lightning.jobs()
    stored = {"state_dict": {}, "pytorch-lightning_version": "2.6.0", "seen": 0}
    torch.save(stored, jobs.folder / "some.ckpt")
    [rank] = lightning.start(jobs, 1, **env)
    assert rank.wait() == 2, rank.said
    [line] = [line for line in rank.said.splitlines() if sentence in line]
    assert line.startswith("spotguard: ")
    [end] = jobs.ends()
    assert sentence in end["message"]
    assert "Traceback" not in rank.said
