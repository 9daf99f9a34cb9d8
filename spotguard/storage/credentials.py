"""Who a store's server will take us for, and where the credentials come from; never a secret."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What credentials there are."""

    source: str
    """Where they come from: a variable, a profile, the machine itself."""
    who: str | None = None
    """A user, role or service account; None if only the server could say."""

    def __str__(self) -> str:
        return f"{self.who}, by {self.source}" if self.who else self.source
