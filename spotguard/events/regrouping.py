"""Nodes that begin an attempt in place: on the cluster of the attempt before, without the lost."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from spotguard.events.keys import MAX_ATTEMPT
from spotguard.events.untrusted import Refused, integer, needed, parse_object, seconds, text

SCHEMA = 1
_MOST_NODES = 99_999
_MAX_PORT = 65_535
_HOST = re.compile(r"(?:[A-Za-z0-9:][A-Za-z0-9._:%-]{0,252})?")


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
        """Return the group that `to_json` wrote; `Refused` if it is none."""
        body = _from_json(raw, "the group")
        listed = body.get("nodes")
        if not isinstance(listed, list) or not listed:
            raise Refused("the group has no nodes")
        return cls(
            attempt=needed(integer(body, "attempt", low=1, high=MAX_ATTEMPT), "attempt"),
            nodes=tuple(sorted({_node_in({"node": each}) for each in listed})),
            host=_host(body),
            port=needed(integer(body, "port", low=0, high=_MAX_PORT), "port"),
            at=needed(seconds(body, "at"), "instant"),
        )


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
        """Return the word that `to_json` wrote; `Refused` if it is none."""
        body = _from_json(raw, "the joining")
        return cls(
            node=_node_in(body),
            leaves=body.get("leaves") is not False,
            host=_host(body),
            port=needed(integer(body, "port", low=0, high=_MAX_PORT), "port"),
        )


def _to_json(fields: dict[str, Any]) -> bytes:
    return json.dumps({"schema": SCHEMA, **fields}, sort_keys=True).encode()


def _from_json(raw: bytes, what: str) -> dict[str, Any]:
    body = parse_object(raw, what)
    if integer(body, "schema") != SCHEMA:
        raise Refused(f"{what} is not of a schema this version reads")
    return body


def _node_in(body: dict[str, Any]) -> int:
    return needed(integer(body, "node", low=0, high=_MOST_NODES), "node")


def _host(body: dict[str, Any]) -> str:
    """Return an address that can be part of a command; empty is none."""
    host = text(body, "host") or ""
    if not _HOST.fullmatch(host):
        raise Refused("its host is no address")
    return host
