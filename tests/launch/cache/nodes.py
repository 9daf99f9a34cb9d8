"""Nodes whose cached folders are kept in one store, for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spotguard.launch.cache.keeping import Keeping, Owner
from spotguard.launch.cache.listing import CacheListing
from spotguard.launch.cache.restoring import BroughtBack, bring_back, newest
from spotguard.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spotguard.storage.base import ObjectStore

KEY = "5e" * 32
RUN = "job-1"
PIECE_BYTES = 100_000
"""More than what is looked through for secrets."""
CACHE, TOKENS = "~/.cache/huggingface", "data/tokens"


def _go_on() -> None:
    """Let every piece pass."""


@dataclass
class Node:
    """One node: two cached folders below a folder of its own."""

    root: Path
    store: ObjectStore
    attempt: int = 1
    index: int = 0
    count: int = 1
    key: str = KEY
    most_bytes: int = 10**9
    secrets: tuple[str, ...] = ()
    clock: FakeClock = field(default_factory=FakeClock)
    wait: Callable[[], None] = _go_on
    had: CacheListing = field(default_factory=CacheListing)
    later: CacheListing = field(default_factory=CacheListing)

    def __post_init__(self) -> None:
        """Make the node, which may be there already."""
        self.home = self.root / "home"
        self.work = self.root / "work"
        self.home.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(parents=True, exist_ok=True)
        self.made: Keeping | None = None

    @property
    def folders(self) -> list[tuple[str, Path]]:
        """As in the setting, and where they are."""
        return [(CACHE, self.home / ".cache/huggingface"), (TOKENS, self.work / "data/tokens")]

    @property
    def owner(self) -> Owner:
        """Whose cache it is."""
        return Owner(
            about=RUN,
            key=self.key,
            attempt=self.attempt,
            node=self.index,
            place=self.index,
            places=self.count,
        )

    @property
    def keeping(self) -> Keeping:
        """The node's part of it; by its clock all files are old."""
        if self.made is None:
            self.made = Keeping(
                self.folders,
                self.owner,
                most_bytes=self.most_bytes,
                secrets=self.secrets,
                clock=self.clock,
                wait=lambda: self.wait(),
                had=self.had,
                later=self.later,
                wall=lambda: 1e12,
            )
        return self.made

    def write(self, path: str, data: bytes | str, folder: int = 0) -> Path:
        """Write a file of the node's."""
        place = self.folders[folder][1] / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data if isinstance(data, bytes) else data.encode())
        return place

    def keep(self, *, final: bool = False) -> bool:
        """Do one round."""
        return self.keeping.round(self.store, final=final)

    def restore(self, stop: Callable[[], bool] = lambda: False) -> BroughtBack:
        """Bring back what earlier attempts have kept."""
        found = newest(self.store, before=self.attempt, node=self.index, key=self.key, about=RUN)
        bring_back(self.store, found, self.folders, stop=stop)
        self.had, self.later = found.listing, found.later
        return found

    def has(self) -> dict[str, bytes]:
        """Return all files by folder and path; of a link, where it leads."""
        found = {}
        for name, root in self.folders:
            for place in sorted(root.rglob("*")):
                path = f"{name}/{place.relative_to(root)}"
                if place.is_symlink():
                    found[path] = b"-> " + str(place.readlink()).encode()
                elif place.is_file():
                    found[path] = place.read_bytes()
        return found
