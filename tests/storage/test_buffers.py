"""Memory for direct I/O."""

from __future__ import annotations

import mmap
import sys

import pytest

from spotguard.storage.buffers import address_of, paged_memory

_HUGE_PAGE_BYTES = 1 << 21


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, 4097, (1 << 21) + 1, 8 << 20])
def test_memory_for_direct_reads_and_writes(size_bytes: int) -> None:
    """Whole pages, of which none is shared with other memory; zeros at first, and writable."""
    memory = paged_memory(size_bytes)

    assert size_bytes <= len(memory) < size_bytes + 2 * mmap.PAGESIZE
    assert len(memory) % mmap.PAGESIZE == 0
    assert not any(memory)
    memory[:] = b"x" * len(memory)
    assert address_of(memory) % mmap.PAGESIZE == 0


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are Linux's")
def test_small_memory_fits_into_one_huge_page() -> None:
    """Else the start of it would lie in small ones, which the disk takes far longer for."""
    for size_bytes in (4096, 1 << 20, 1 << 21):
        assert address_of(paged_memory(size_bytes)) % _HUGE_PAGE_BYTES == 0
