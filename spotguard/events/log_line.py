"""One line that a rank printed, as it stands in the run store: a line of JSON in a piece.

    {"at": 1700000000.125, "rank": 3, "from": "stderr", "text": "step 7"}

`rank` is missing for what the launcher of a node's ranks says. `more` stands in a line that had no
end yet when it was stored: the next one of the same rank and stream goes on with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from spotguard.events.untrusted import Refused, integer, needed, parse_object, seconds, text

STDOUT, STDERR, LAUNCHER = "stdout", "stderr", "launcher"
"""Where a line was printed; the launcher's are those of what starts the ranks, and of the agent."""
_STREAMS = frozenset({STDOUT, STDERR, LAUNCHER})


@dataclass(frozen=True)
class StoredLine:
    """A line, or a part of a long one."""

    at: float
    """When it was seen, in seconds since the epoch."""
    rank: int | None
    """None: no rank printed it."""
    stream: str
    text: str
    more: bool = False
    """Its end was not printed yet."""

    def to_json(self) -> bytes:
        """Return the line as the store keeps it."""
        body: dict[str, Any] = {"at": round(self.at, 3)}
        if self.rank is not None:
            body["rank"] = self.rank
        body["from"] = self.stream
        body["text"] = self.text
        if self.more:
            body["more"] = True
        return json.dumps(body, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> StoredLine:
        """Return the line that `to_json` wrote; `Refused` if it is none."""
        body = parse_object(raw, "the line")
        stream = text(body, "from")
        if stream not in _STREAMS:
            raise Refused("nobody prints there")
        return cls(
            at=needed(seconds(body, "at"), "instant"),
            rank=integer(body, "rank", low=0),
            stream=stream,
            text=needed(text(body, "text"), "text"),
            more=body.get("more") is True,
        )
