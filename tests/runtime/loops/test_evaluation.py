from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from spotguard.runtime.loop.evaluation import Evaluation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Loop:
    """What a run's own loop over an evaluation would be: it counts its beginnings and ends."""

    def __init__(self) -> None:
        self.begun = self.ended = 0

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield from them."""
        self.begun += 1
        try:
            yield from batches
        finally:
            self.ended += 1


def accuracy(loader: Any) -> float:
    """Evaluate as scripts do, which ask their loader for its length and its dataset."""
    correct = sum(int(batch.sum()) for (batch,) in loader)
    assert loader.batch_size == 2
    assert loader._index_sampler is loader.batch_sampler  # as frameworks ask for
    return correct / len(loader.dataset) + len(loader)


def test_a_function_that_takes_a_loader_takes_an_evaluation() -> None:
    """Length, dataset and batch size are the loader's; a second evaluation begins anew."""
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(7)), batch_size=2)
    loop = Loop()
    evaluation = Evaluation(loader, loop)
    assert accuracy(evaluation) == accuracy(evaluation) == accuracy(loader) == 7
    assert (loop.begun, loop.ended) == (2, 2)


def test_a_loop_that_is_left_has_ended() -> None:
    """After `break` nothing of it is under way, and the next loop begins with the first batch."""
    loop = Loop()
    evaluation = Evaluation(range(5), loop)
    for number in evaluation:
        if number == 2:
            break
    assert (loop.begun, loop.ended) == (1, 1)
    assert list(evaluation) == [0, 1, 2, 3, 4]


def test_batches_may_be_asked_for_one_by_one() -> None:
    """`next` goes on where it was, and so does a loop after it; `close` ends what it began."""
    loop = Loop()
    evaluation = Evaluation(itertools.count(), loop)
    assert [next(evaluation), next(evaluation)] == [0, 1]
    assert next(iter(evaluation)) == 2
    evaluation.close()
    evaluation.close()
    assert (loop.begun, loop.ended) == (1, 1)


def test_nothing_is_begun_before_it_is_looped_over() -> None:
    """A run may be told to stop from the first batch on, not before."""
    loop = Loop()
    assert len(Evaluation([1, 2, 3], loop)) == 3
    assert loop.begun == 0


def test_an_evaluation_can_be_copied() -> None:
    """As the loader that it stands for; a copy that is being made has nothing to ask yet."""
    assert list(copy.copy(Evaluation([1, 2], Loop()))) == [1, 2]


def test_what_has_no_length_says_so() -> None:
    """As any stream does; it is true all the same, and can be listed."""
    evaluation = Evaluation(iter([1, 2]), Loop())
    with pytest.raises(TypeError, match="has no len"):
        len(evaluation)
    with pytest.raises(AttributeError, match="dataset"):
        evaluation.dataset  # noqa: B018
    assert evaluation
    assert list(evaluation) == [1, 2]
