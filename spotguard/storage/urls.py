"""Stores' URLs: what is below one."""

from __future__ import annotations


def below(url: str, name: str) -> str:
    """Return the URL of the folder `name` in the store at `url`; its options stay at the end."""
    place, mark, options = url.partition("?")
    return f"{place.rstrip('/')}/{name.strip('/')}{mark}{options}"


def split_last(url: str) -> tuple[str, str]:
    """Return the URL of the store above a folder, and the folder's name: `below` undone."""
    place, mark, options = url.partition("?") if "://" in url else (url, "", "")
    above, _, name = place.rstrip("/").rpartition("/")
    return f"{above}{mark}{options}" if above else "", name


def is_folder(url: str) -> bool:
    """Return whether a store is a folder, or memory: whether asking it costs nothing."""
    return not url.startswith(("s3://", "gs://", "az://", "https://"))
