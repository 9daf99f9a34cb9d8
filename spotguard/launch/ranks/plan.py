"""Which ranks a node is to start, and where they meet those of the other nodes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """What torchrun's flags ask for."""

    nodes: int
    node: int
    """Its place among them, from 0."""
    ranks: int
    """On this node, and on each."""
    host: str
    """The first node's name or address."""
    port: int
    """Where the nodes gather on it; for a job of one process, where nobody meets."""
    script: tuple[str, ...]
    """The file, and what it is called with."""
    log_dir: Path | None = None
    """Where each rank prints into files of its own; None: they print where this process does."""

    @property
    def world(self) -> int:
        """The number of all ranks."""
        return self.nodes * self.ranks

    @classmethod
    def of(cls, arguments: Sequence[str]) -> RankPlan:
        """Return what the flags say; ends the process where they make no sense."""
        parser = argparse.ArgumentParser(prog="python -m spotguard.launch.ranks")
        for flag in ("--nnodes", "--nproc-per-node", "--master-port"):
            parser.add_argument(flag, type=int, required=True)
        parser.add_argument("--node-rank", type=int, default=0)
        parser.add_argument("--master-addr", required=True)
        for flag in ("--max-restarts", "--redirects"):
            parser.add_argument(flag)
        parser.add_argument("--log-dir", type=Path)
        parser.add_argument("script", nargs=argparse.REMAINDER)
        given = parser.parse_args(arguments)
        return cls(
            nodes=given.nnodes,
            node=given.node_rank,
            ranks=given.nproc_per_node,
            host=given.master_addr,
            port=given.master_port,
            script=tuple(given.script),
            log_dir=given.log_dir,
        )
