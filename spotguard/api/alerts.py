"""Who is told of runs: the webhooks of the settings."""

from __future__ import annotations

from spotguard.control.supervisor.notify import check_urls, post_to, public_name
from spotguard.spec.sources import alerts_named

__all__ = ["alerts_named", "check_urls", "post_to", "public_name"]
