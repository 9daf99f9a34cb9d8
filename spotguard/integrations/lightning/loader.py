"""What the Trainer reads in the place of the script's own loader: one item for each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from spotguard.runtime.data.loader import Loader


class StepLoader:
    """Gives the Trainer one item for each optimizer step: its first micro-batch on this rank."""

    def __init__(
        self, loader: Loader, steps_per_epoch: int, dataset: Any, next_batch: Callable[[], Any]
    ) -> None:
        self.loader = loader
        self.dataset = dataset
        self.batch_size = loader.micro_batch_size
        self._steps_per_epoch = steps_per_epoch
        self._next_batch = next_batch

    def __len__(self) -> int:
        """Return the optimizer steps in one pass over the data."""
        return self._steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Return what begins the next step, whichever that is, and gives its first micro-batch."""
        return _Steps(self._next_batch)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the number of the step says where the data is."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take nothing."""


class _Steps:
    def __init__(self, next_batch: Callable[[], Any]) -> None:
        self._next_batch = next_batch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._next_batch()
