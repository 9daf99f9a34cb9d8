"""The comparison of interrupted epochs judges rightly; which rivals are installed is no matter."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.elastic_rivals.deepspeed_elasticity import CONFIGS, Worlds
from benchmarks.elastic_rivals.table import Row, judge, outcome, row, to_markdown
from benchmarks.elastic_rivals.ways import (
    GLOBAL_BATCH,
    RANKS,
    SAMPLES,
    Saved,
    Spotguard,
    Torchrun,
    TorchrunSkips,
    Way,
    together,
)

WHOLE = [[*range(start, start + 100)] for start in range(0, SAMPLES, 100)]


def test_an_undisturbed_epoch_is_read_once_in_the_same_steps() -> None:
    """Nothing repeated, nothing left out; the order within a step does not matter."""
    found = judge(3, WHOLE[:40], [step[::-1] for step in WHOLE[40:]], WHOLE)

    assert found.once
    assert found.same_steps
    assert str(found) == "0 / 0 ="


def test_repeated_and_unread_samples_are_told_apart() -> None:
    """What is read twice and what is never read are each a share of the samples."""
    found = judge(3, WHOLE[:40], WHOLE[30:90], WHOLE)

    assert (found.repeated, found.never) == (10.0, 10.0)
    assert not found.once
    assert not found.same_steps
    assert str(found) == "10 / 10"


def test_padding_in_the_last_step_does_not_make_the_others_differ() -> None:
    """A sampler that repeats a sample at the end repeats it; its other steps are the same."""
    found = judge(3, WHOLE[:40], [*WHOLE[40:-1], [*WHOLE[-1], 0]], WHOLE)

    assert (found.repeated, found.same_steps) == (0.01, True)
    assert not found.once


def test_ours_reads_each_sample_once_also_with_ranks_that_have_nothing_to_do() -> None:
    """The real loader: the same steps on 3 ranks, and on 64 for 60 micro-batches."""
    way = Spotguard()
    saved = way.interrupt(GLOBAL_BATCH)
    whole = together(way.loaders(RANKS, GLOBAL_BATCH, None))

    for ranks in (3, 64):
        found = outcome(way, ranks, GLOBAL_BATCH, saved, whole)
        assert (found.once, found.same_steps, found.global_batch) == (True, True, GLOBAL_BATCH)


@pytest.mark.parametrize(("way", "repeated"), [(Torchrun(), 38.4), (TorchrunSkips(), 9.62)])
def test_plain_samplers_repeat_when_each_ranks_batch_is_kept(way: Way, repeated: float) -> None:
    """480 x 8 samples were read on 4 ranks: 3 ranks skip 360 x 8 of them, or none."""
    saved = way.interrupt(120)
    whole = together(way.loaders(RANKS, 120, None))
    found = outcome(way, 3, 120, saved, whole)

    assert found.repeated == pytest.approx(repeated)
    assert (found.never, found.global_batch) == (0, 360)


class Refuses(Torchrun):
    """A library that wants a number of ranks that divides its batch."""

    def loaders(self, ranks: int, batch: int, saved: Saved | None) -> list[Any]:
        """Refuse three ranks."""
        if ranks == 3:
            raise ValueError("3 does not divide it")
        return super().loaders(ranks, batch, saved)


def test_a_refusal_is_an_outcome() -> None:
    """A library that says no is not blamed for repeats: the table says `refused`."""
    found = outcome(Refuses(), 3, 160, Saved(read=[], own=[]), [])

    assert (str(found), found.refused, found.once) == ("refused", "3 does not divide it", False)


def test_the_tables_hold_a_row_for_each_way_and_configuration() -> None:
    """Percentages, counts over many ranks, DeepSpeed's sizes, and who was left out."""
    found = judge(3, WHOLE[:40], WHOLE[40:], WHOLE)
    ours = Row(way="ours", kept="global", outcomes=[found] * 3, many=[found] * 64)
    deep = Worlds(config=CONFIGS[0], batches={480: [1, 2], 504: [7]}, refused=[9])
    text = to_markdown([ours], [deep], ["Lightning: left out"], "torch 2")

    assert "| ours | global | 100 100 100 | 0 / 0 = | 0 / 0 = | 0 / 0 = | 64 | 64 |" in text
    assert "| v0.1, at most 512, micro-batches 2, 4, 8 | 2 of 480..504 | 3 | 1 |" in text
    assert "- Lightning: left out" in text


def test_a_row_tries_many_numbers_of_ranks_with_the_global_batch_kept() -> None:
    """With each rank's batch kept, only the three changes of the table are tried."""
    found = row(TorchrunSkips(), keep_global=False)

    assert [o.global_batch for o in found.outcomes] == [480, 360, 240]
    assert not found.many
