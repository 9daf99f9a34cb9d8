"""What happened in the lab, for people and for tests."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import settings

if TYPE_CHECKING:
    from collections.abc import Mapping

events: list[str] = []
_lock = threading.Lock()


def note(text: str) -> None:
    """Write down what happened, with its time."""
    now = time.time()
    line = f"{time.strftime('%H:%M:%S', time.localtime(now))}.{int(now * 1000) % 1000:03d} {text}"
    events.append(line)
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def note_call(call: Mapping[str, Any]) -> None:
    """Append one API call to `calls.jsonl`."""
    with _lock, (settings.DATA / "calls.jsonl").open("a") as file:
        file.write(json.dumps(dict(call)) + "\n")


def calls() -> list[dict[str, Any]]:
    """Return every API call since the lab came up, oldest first."""
    path = settings.DATA / "calls.jsonl"
    if not path.exists():
        return []
    with _lock:
        return [json.loads(line) for line in path.read_text().splitlines()]
