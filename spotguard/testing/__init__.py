"""Public fakes: a cloud's metadata service, stores, clocks and launchers whose faults you script.

Nothing here is imported until it is used, so that a test pays only for the fakes it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from spotguard.events.sample_log_reader import read_sample_trace
    from spotguard.launch.local.metadata_service import FakeMetadata
    from spotguard.testing.clock import FakeClock
    from spotguard.testing.coordination import FakeRendezvous
    from spotguard.testing.launcher import FakeLauncher
    from spotguard.testing.stores import FaultyStore, MemoryStore

_MODULE_OF: Final = {
    "FakeClock": "spotguard.testing.clock",
    "FakeLauncher": "spotguard.testing.launcher",
    "FakeMetadata": "spotguard.launch.local.metadata_service",
    "FakeRendezvous": "spotguard.testing.coordination",
    "FaultyStore": "spotguard.testing.stores",
    "MemoryStore": "spotguard.testing.stores",
    "read_sample_trace": "spotguard.events.sample_log_reader",
}

__all__ = [
    "FakeClock",
    "FakeLauncher",
    "FakeMetadata",
    "FakeRendezvous",
    "FaultyStore",
    "MemoryStore",
    "read_sample_trace",
]


def __getattr__(name: str) -> object:
    """Import a fake when it is first asked for."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    """Return the names of the fakes."""
    return sorted(__all__)
