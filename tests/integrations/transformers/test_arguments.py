"""Whether a loss can have been divided by the number of items, from the code that computes it."""

from __future__ import annotations

import functools
from typing import Any

import pytest

pytest.importorskip("transformers")  # an extra, which `make integrations` installs

from spotguard.integrations.transformers.arguments import uses_argument


class Base:
    """Divides."""

    def loss(self, model: Any, items: Any = None) -> Any:
        """Return the loss."""
        return model / items


class Ignores(Base):
    """Has the argument, since the Trainer passes it, and does not look at it."""

    def loss(self, model: Any, items: Any = None) -> Any:
        """Return the mean."""
        return super().loss(model)


class Passes(Base):
    """Hands it on by whatever name it has."""

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss."""
        return super().loss(*args, **kwargs)


class Nested(Base):
    """Uses it in a function of its own."""

    def loss(self, model: Any, items: Any = None) -> Any:
        """Return the loss."""
        return (lambda: model / items)()


class Wrapped(Base):
    """Is decorated."""

    @functools.lru_cache  # noqa: B019
    def loss(self, model: Any, items: Any = None) -> Any:
        """Return the mean."""
        return model


@pytest.mark.parametrize(
    ("kind", "uses"),
    [(Base, True), (Ignores, False), (Passes, True), (Nested, True), (Wrapped, False)],
)
def test_what_is_never_read_was_not_used(kind: type[Base], uses: bool) -> None:
    """Only where the code cannot know the number, it is said not to be used."""
    assert uses_argument(kind().loss, "items") is uses
    assert uses_argument(len, "items")
