from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotguard.runtime.data.permutation import Permutation
from spotguard.runtime.state.rng import mix

KEYS = st.integers(min_value=0, max_value=2**64 - 1)
LISTED = list(map(Permutation(9000, key=3).__getitem__, range(9000)))


@given(size=st.integers(min_value=1, max_value=3000), key=KEYS)
def test_every_index_comes_once(size: int, key: int) -> None:
    """For any size and key, the order is a permutation: nothing twice, nothing left out."""
    order = Permutation(size, key)

    assert len(order) == size
    assert sorted(order[i] for i in range(size)) == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 1023, 1024, 1025])
def test_every_index_comes_once_at_the_borders(size: int) -> None:
    """Around the powers of two and four, where the number of bits changes, nothing slips."""
    for order in (Permutation(size, key) for key in range(20)):
        assert sorted(order[i] for i in range(size)) == list(range(size))


def test_ten_billion_samples_need_no_memory() -> None:
    """Any index of a huge dataset is answered at once, without a table of it."""
    tracemalloc.start()
    order = Permutation(10**10, key=7)
    found = [order[i] for i in (0, 1, 5_000_000_000, 10**10 - 1)]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert len(set(found)) == 4
    assert all(0 <= index < 10**10 for index in found)
    assert peak_bytes < 2_000_000, "some thousand positions at a time, never all"


@pytest.mark.slow
@given(
    size=st.integers(min_value=2**31, max_value=2**40),
    positions=st.sets(st.integers(min_value=0, max_value=2**31 - 1), min_size=2, max_size=50),
    key=KEYS,
)
def test_large_sizes_collide_nowhere(size: int, positions: set[int], key: int) -> None:
    """Where all of it cannot be listed, different positions still give different samples."""
    order = Permutation(size, key)
    found = [order[position] for position in positions]

    assert len(set(found)) == len(positions)
    assert all(0 <= index < size for index in found)


@given(
    start=st.integers(min_value=-9000, max_value=9000),
    stop=st.integers(min_value=-9000, max_value=9000),
    step=st.sampled_from([1, 1, 1, 2, 700, -1, -700]),
)
def test_a_slice_gives_what_a_list_would(start: int, stop: int, step: int) -> None:
    """Also across the borders of what is computed in one go, and with nothing in it."""
    order = Permutation(9000, key=3)
    assert order[start:stop:step] == LISTED[start:stop:step]


@pytest.mark.parametrize("position", [-1, 10, 11])
def test_a_position_outside_is_an_error(position: int) -> None:
    """A wrong position is never answered with some sample."""
    with pytest.raises(IndexError):
        Permutation(10, 1)[position]


@pytest.mark.slow
def test_each_epoch_has_another_order() -> None:
    """Epochs and seeds differ in their order; the same ones agree, on every machine."""
    orders = {
        (seed, epoch): tuple(Permutation(50, mix(seed, epoch))[i] for i in range(50))
        for seed, epoch in itertools.product(range(5), range(20))
    }

    assert len(set(orders.values())) == len(orders)
    assert orders[0, 0][:8] == tuple(Permutation(50, mix(0, 0))[i] for i in range(8))


def test_the_order_never_changes_between_versions() -> None:
    """The order is part of a run: a resume with a newer spotguard must read on in the same one."""
    order = Permutation(1000, mix(7, 3))

    assert [order[i] for i in range(8)] == [674, 797, 516, 704, 616, 971, 929, 493]


def test_positions_are_spread_evenly() -> None:
    """Each tenth of the dataset is found in each tenth of the epoch about equally often."""
    counts = [[0] * 10 for _ in range(10)]
    for key in range(20):
        order = Permutation(1000, mix(key))
        for position in range(1000):
            counts[position // 100][order[position] // 100] += 1

    chi_squared = sum((count - 200) ** 2 / 200 for row in counts for count in row)
    assert chi_squared < 140  # 81 degrees of freedom: above 140 in one of 20 000 cases
