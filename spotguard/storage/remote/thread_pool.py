"""Calls made side by side, also at the very end of a process.

The pool of `concurrent.futures` takes no work once the interpreter begins to end, and that is when
a script that left its loop early makes its last save.
"""

from __future__ import annotations

import os
import queue
import threading
from concurrent.futures import Future
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Result = TypeVar("Result")
_Item = tuple["Future[Any]", Context, "Callable[..., Any]", tuple[Any, ...]]


class Crew:
    """Up to so many daemon threads, started as they are needed. Thread-safe."""

    def __init__(self, threads: int, name: str) -> None:
        self._most = threads
        self._name = name
        self._begin()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the threads go, each when it has no more to do."""
        for _number in range(self._count):
            self._items.put(None)

    def submit(self, call: Callable[..., Result], *args: Any) -> Future[Result]:
        """Make the call in a thread, in the caller's context; where there is none, here."""
        if self._pid != os.getpid():  # a forked child has none of its parent's threads
            self._begin()
        future: Future[Result] = Future()
        self._items.put((future, copy_context(), call, args))
        if not self._idle.acquire(blocking=False) and not self._hire():
            self._make(self._items.get())  # there is no thread, and will be none
        return future

    def map(self, call: Callable[..., Result], items: Iterable[Any]) -> list[Result]:
        """Return what the call returns for each item, in order; raises what the first raised."""
        return [future.result() for future in [self.submit(call, item) for item in items]]

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._count = 0
        self._lock = threading.Lock()

    def _hire(self) -> bool:
        """Start another thread if there may be one; False if nobody is there to do the work."""
        with self._lock:
            if self._count < self._most:
                try:
                    threading.Thread(target=self._work, name=self._name, daemon=True).start()
                except RuntimeError:  # later Pythons start no thread at their end
                    return self._count > 0
                self._count += 1
        return True

    def _work(self) -> None:
        while (item := self._items.get()) is not None:
            self._make(item)
            del item  # an idle thread keeps nobody's memory
            self._idle.release()

    def _make(self, item: _Item | None) -> None:
        assert item is not None
        future, context, call, args = item
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = context.run(call, *args)
        except BaseException as problem:  # noqa: BLE001  raised by whoever asks for the result
            future.set_exception(problem)
        else:
            future.set_result(result)
