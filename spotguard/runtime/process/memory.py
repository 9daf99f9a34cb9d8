"""The memory that this process may have, and how it says that there is no more."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_NO_MEMORY: Final = (
    *("not enough memory", "can't allocate memory", "out of memory", "cannot allocate"),
    "alloc_failed",  # cuBLAS and cuDNN at their first use
    "bad_alloc",  # of C++, which torch hands on as an error of its own
    # oneDNN, which computes convolutions on CPUs, has no other words for it.
    *("could not create a primitive", "could not execute a primitive"),
)
_M_MMAP_THRESHOLD: Final = -3
"""Of `malloc.h`."""
_OF_ITS_OWN_BYTES: Final = 1 << 20


def memory_of(device: torch.device) -> int | None:
    """Return the bytes that the process may have on its device, None if there is no limit."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        import resource
    except ImportError:  # on Windows
        return None
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=None)


def is_lack_of_memory(problem: Exception) -> bool:
    """Return whether an error says that memory is over."""
    if isinstance(problem, (MemoryError, torch.cuda.OutOfMemoryError)):
        return True
    return any(words in str(problem).lower() for words in _NO_MEMORY)


def give_back_what_is_freed() -> None:
    """Have every large tensor of the CPU be a mapping of its own, from now on.

    As glibc comes, it puts tensors of up to 32 MB on its heap as soon as one of that size was
    freed. The heap ends with whatever small object lies highest, and a limit counts all below it:
    a net of convolutions that was tried with too many samples held 250 MB afterwards, of which
    little was used again. So sizes were found to fit, and did not after others had been tried.
    A new mapping costs the zeroing of its pages, which a limited process pays for all its steps.
    """
    set_threshold = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none, nor that heap
    if set_threshold is not None:
        set_threshold(_M_MMAP_THRESHOLD, _OF_ITS_OWN_BYTES)


def in_its_own_thread(work: Callable[[], None]) -> None:
    """Do what may find no memory on a CPU, in a thread that ends with it. Blocks until then.

    Where oneDNN finds none for the code of a kernel, it makes no more kernels in that thread, for
    good: what generates the code (Xbyak) keeps its first error, one for each thread. So a size that
    was too large made all later ones fail, and the training after them.
    """
    problems: list[BaseException] = []
    grad = torch.is_grad_enabled()
    autocast, precision = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def run() -> None:  # torch keeps these by thread
        try:
            with torch.set_grad_enabled(grad), torch.autocast("cpu", precision, enabled=autocast):
                work()
        except BaseException as problem:  # noqa: BLE001 - it goes on where it was waited for
            problems.append(problem)

    thread = threading.Thread(target=run, name="spotguard-try", daemon=True)
    thread.start()
    thread.join()
    if problems:
        raise problems.pop()
