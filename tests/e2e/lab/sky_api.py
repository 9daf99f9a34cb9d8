"""SkyPilot's API server of a lab."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

_STARTS = 3


class HasSkyPilot(Protocol):
    """A lab in which SkyPilot runs."""

    environ: dict[str, str]

    def sky(self, *words: str) -> str:
        """Run SkyPilot's command line."""
        ...

    def verb(self, *words: str) -> str:
        """Run one of the lab's verbs."""
        ...


def start_api(lab: HasSkyPilot) -> None:
    """Start the API server; on a busy machine it may give up before it serves."""
    for left in reversed(range(_STARTS)):
        try:
            lab.sky("api", "start")
            return
        except AssertionError as failure:
            log = Path(lab.environ["HOME"], ".sky", "api_server", "server.log")
            said = log.read_text(errors="replace")[-4000:] if log.exists() else "no log"
            if not left:
                raise AssertionError(f"{failure}\n{said}") from failure
            lab.verb("end-api")  # too slow, it may still be on its way, and hold a port
