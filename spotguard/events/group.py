"""Nodes that begin an attempt in place: on the cluster of the attempt before, without the lost."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Group:
    """Who begins the attempt, and where they meet. Created if absent, so that it is one group."""

    attempt: int
    nodes: tuple[int, ...]
    """Indices in the cluster, ascending; the first one hosts the rendezvous."""
    host: str
    port: int
    at: float
    """Seconds since the epoch: the attempt before ended here."""

    def to_json(self) -> bytes:
        """Return the group as the bytes the store keeps."""
        return _to_json(self.__dict__)

    @classmethod
    def from_json(cls, raw: bytes) -> Group:
        """Return the group that `to_json` wrote; ValueError if it is none."""
        with _refusing("a group"):
            body = _from_json(raw, "a group")
            group = cls(**{**body, "nodes": tuple(map(int, body["nodes"]))})
            if not group.nodes or not isinstance(group.at, (int, float)):
                raise ValueError("not a group with nodes and a time")
            return group


@dataclass(frozen=True, kw_only=True)
class Joining:
    """One node's word: it would begin the attempt, or it leaves."""

    node: int
    leaves: bool
    host: str = ""
    port: int = 0

    def to_json(self) -> bytes:
        """Return the word as the bytes the store keeps."""
        return _to_json(self.__dict__)

    @classmethod
    def from_json(cls, raw: bytes) -> Joining:
        """Return the word that `to_json` wrote; ValueError if it is none."""
        with _refusing("a joining"):
            return cls(**_from_json(raw, "a joining"))


def _to_json(fields: dict[str, Any]) -> bytes:
    return json.dumps({"schema": SCHEMA, **fields}, sort_keys=True).encode()


def _from_json(raw: bytes, what: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(raw)
    if body.pop("schema") != SCHEMA:
        raise ValueError(f"not {what} of a schema this version reads")
    return body


@contextlib.contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turn what is wrong with untrusted bytes into a ValueError."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as problem:
        raise ValueError(f"not {what}: {problem}") from problem
