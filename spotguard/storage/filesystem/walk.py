"""A folder tree walked in key order, one folder at a time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from spotguard.storage.keys import is_part

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def walk(root: Path, prefix: str, start_after: str) -> Iterator[str]:
    """Yield, sorted, the keys of files below `root` that match; skips whole folders that cannot."""
    yield from _walk(root, prefix.rpartition("/")[0], prefix, start_after)


def folders_in(root: Path, prefix: str) -> list[str]:
    """Return, sorted, the folders right below `prefix`, each with its trailing `/`."""
    return [key for key in _entries(root, prefix.rstrip("/")) if key.endswith("/")]


def _walk(root: Path, folder: str, prefix: str, start_after: str) -> Iterator[str]:
    for key in _entries(root, folder):
        if not key.endswith("/"):
            if key.startswith(prefix) and key > start_after:
                yield key
        elif (key.startswith(prefix) or prefix.startswith(key)) and (
            key > start_after or start_after.startswith(key)
        ):
            yield from _walk(root, key[:-1], prefix, start_after)


def _entries(root: Path, folder: str) -> list[str]:
    """Return the keys in `folder`, subfolders with a `/`: so they sort as their contents do."""
    start = f"{folder}/" if folder else ""
    try:
        with os.scandir(root / folder) as found:
            return sorted(
                start + entry.name + "/" * _is_folder(entry) for entry in found if _kept(entry)
            )
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    # Links are not followed: they can form a loop, or lead out of the store.
    return entry.is_dir(follow_symlinks=False)


def _kept(entry: os.DirEntry[str]) -> bool:
    return is_part(entry.name) and (_is_folder(entry) or entry.is_file(follow_symlinks=False))
