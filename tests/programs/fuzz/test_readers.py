"""Some mutated documents in the quick tests; `make fuzz` tries 100 000 for each reader."""

from __future__ import annotations

import json
import os

import pytest

from tests.programs.fuzz.readers import READERS, Reader

SEED = int(os.environ.get("SPOTGUARD_FUZZ_SEED", "1"))
COUNT = 10_000 // len(READERS)


@pytest.mark.parametrize("name", READERS)
def test_a_reader_refuses_or_reads_whatever_comes(name: str) -> None:
    """It raises nothing but its own error, in a second, in little memory."""
    READERS[name].fuzz(COUNT, SEED)


def test_a_reader_that_lets_something_through_is_named_with_the_seed() -> None:
    """An error of another kind, for any input, ends the fuzzing and can be played again."""
    careless = Reader(read=json.loads, refusals=(), originals=(b"{}",))
    with pytest.raises(AssertionError, match=r"seed 7: .*Error for b"):
        careless.fuzz(100, 7)


@pytest.mark.parametrize("name", READERS)
def test_a_reader_reads_what_the_mutants_are_made_of(name: str) -> None:
    """Else all of them would be refused at the same first step."""
    reader = READERS[name]
    reader.read(reader.originals[0])
