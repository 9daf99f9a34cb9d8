"""The batches of an evaluation, as a script's own evaluating function sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

_Batch = TypeVar("_Batch", covariant=True)


class Evaluation(Iterator[_Batch]):
    """Stands where the script's loader stood: each loop over it is one that the run may leave.

    Whatever else a function asks its loader for (`len(loader)`, `loader.dataset`, a sampler) is
    answered by the loader itself, so that `test(model, loader)` need not be changed.
    """

    def __init__(
        self, batches: Iterable[_Batch], begin: Callable[[Iterable[_Batch]], Iterator[_Batch]]
    ) -> None:
        self._batches = batches
        self._begin = begin
        self._pass: Iterator[_Batch] | None = None
        """The pass under way, if its batches are asked for one by one, by `next`."""

    def __iter__(self) -> Iterator[_Batch]:
        """Begin another pass, or go on with the one that `next` has begun."""
        return self._pass if self._pass is not None else self._begin(self._batches)

    def __next__(self) -> _Batch:
        if self._pass is None:
            self._pass = self._begin(self._batches)
        return next(self._pass)

    def __len__(self) -> int:
        """Return the number of batches.

        Raises:
            TypeError: what was given has no length.
        """
        return len(self._batches)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        """Return True, also if there is no batch, and where the number is not known."""
        return True

    def __getattr__(self, name: str) -> Any:
        if name == "_batches" or name.startswith("__"):  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._batches, name)

    def close(self) -> None:
        """End the pass that `next` has begun."""
        begun, self._pass = self._pass, None
        close = getattr(begun, "close", None)
        if close is not None:
            close()
