"""One question to SkyPilot for all who ask it at the same time, each about a cluster of its own.

A look at a cluster takes SkyPilot seconds, at many clusters not much longer: it asks for all of
them side by side. A process that looks after many runs would else ask for each alone.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from spotguard.errors import SpotguardError
from spotguard.launch.base import Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

A = TypeVar("A")
_PATIENCE_S = 3.0
"""How long who asks next waits for the answer under way: one cluster that hangs delays no other."""


@dataclass
class _Round(Generic[A]):
    names: list[str] = field(default_factory=list)
    found: Mapping[str, A] = field(default_factory=dict)
    problem: SpotguardError | None = None
    over: threading.Event = field(default_factory=threading.Event)


class AskedTogether(Generic[A]):
    """Who asks while an answer is under way is asked for in the next round. Thread-safe."""

    def __init__(self, ask: Callable[[Sequence[str]], Mapping[str, A]]) -> None:
        """`ask` returns what is known of each name, and leaves out those of which nothing is."""
        self._ask = ask
        self._next: _Round[A] = _Round()
        self._lock = threading.Lock()
        self._one = threading.Lock()

    def about(self, name: str) -> A | None:
        """Return the answer on one name, as fresh as if it were asked for alone; None if none.

        Blocks for one round, and for what is left of the one before. Raises what the question
        about this name raises.
        """
        with self._lock:
            mine = self._next
            leads = not mine.names
            mine.names.append(name)
        if leads:
            self._lead(mine)
        else:
            mine.over.wait()
        if mine.problem is None:
            return mine.found.get(name)
        if len(set(mine.names)) > 1:  # it may be of another one's
            return self._ask([name]).get(name)
        raise mine.problem

    def _lead(self, mine: _Round[A]) -> None:
        alone = self._one.acquire(timeout=_PATIENCE_S)
        try:
            with self._lock:
                self._next = _Round()  # who comes from here on may see less than is true by then
            mine.problem = Unreachable("who asked SkyPilot has died")  # unless it comes back
            mine.found = self._ask(list(dict.fromkeys(mine.names)))
            mine.problem = None
        except SpotguardError as problem:
            mine.problem = problem
        finally:
            if alone:
                self._one.release()
            mine.over.set()
