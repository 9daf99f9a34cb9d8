"""Nodes that begin an attempt in place: on the cluster of the attempt before, without the lost."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

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
        return json.dumps({"schema": SCHEMA, **self.__dict__}, sort_keys=True).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Group:
        """Return the group that `to_json` wrote; ValueError if it is none."""
        try:
            body: dict[str, Any] = json.loads(raw)
            if body.pop("schema") != SCHEMA:
                raise ValueError("not a group of a schema this version reads")
            group = cls(**{**body, "nodes": tuple(map(int, body["nodes"]))})
            if not group.nodes or not isinstance(group.at, (int, float)):
                raise ValueError("a group without nodes, or without a time")
            return group
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as problem:
            raise ValueError(f"not a group: {problem}") from problem


@dataclass(frozen=True, kw_only=True)
class Joining:
    """One node's word: it would begin the attempt, or it leaves."""

    node: int
    leaves: bool
    host: str = ""
    port: int = 0

    def to_json(self) -> bytes:
        """Return the word as the bytes the store keeps."""
        return json.dumps({"schema": SCHEMA, **self.__dict__}, sort_keys=True).encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Joining:
        """Return the word that `to_json` wrote; ValueError if it is none."""
        try:
            body: dict[str, Any] = json.loads(raw)
            if body.pop("schema") != SCHEMA:
                raise ValueError("not a word of a schema this version reads")
            return cls(**body)
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as problem:
            raise ValueError(f"not a joining: {problem}") from problem
