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


def who_am_i(url: str) -> Identity | None:
    """Return the credentials that the store at `url` would be used with; None needs none.

    Raises:
        StoreError: there are none, or they cannot be used; the hint says how to get some.
        UsageError: the URL or the environment makes no sense.
        MissingExtra: the vendor's package is not installed.
    """
    scheme = url.partition("://")[0].lower()
    if scheme == "s3":
        from spotguard.storage.s3_whoami import s3_identity

        return s3_identity(url)
    if scheme == "gs":
        from spotguard.storage.gcs_whoami import gcs_identity

        return gcs_identity(url)
    if scheme == "az":
        from spotguard.storage.azure_whoami import azure_identity

        return azure_identity(url)
    return None
