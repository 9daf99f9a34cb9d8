"""Which folders of a node may be kept in the run store, and how they are written down."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Final

COMPILED: Final = "~/.cache/spotguard/torch"
"""Where `torch.compile` keeps what it made, unless the user has named another folder for it."""
_HOME: Final = "~/"
_PRIVATE: Final = (
    *(".ssh", ".aws", ".azure", ".config", ".docker", ".gnupg", ".kube", ".oci", ".netrc"),
    *(".sky", ".spotguard", ".local/share/keyrings"),
)
"""Below the home: keys and logins, or what is SkyPilot's and ours."""


def cache_folder(given: str, *, home: str, workdir: str) -> str:
    """Return a folder in its one spelling: `~/…`, or seen from the workdir.

    A shell makes `/home/me/…` of `~/…` before anybody sees it, so an absolute path below `home`
    (of this machine) or below `workdir` means the same on a node.

    Raises:
        ValueError: it is outside of both, one of them as a whole, or holds what is private.
    """
    text = given.strip().rstrip("/")
    if text in (home, workdir):
        raise ValueError("it is the whole home or workdir")
    for base, prefix in ((workdir, ""), (home, _HOME)):
        if text.startswith("/") and Path(base) in Path(text).parents:
            text = prefix + Path(text).relative_to(base).as_posix()
            break
    below_home = text.startswith(_HOME)
    inner = PurePosixPath(text.removeprefix(_HOME) if below_home else text)
    parts = inner.parts
    if text in ("", "~", ".", "/") or not parts:
        raise ValueError("it must be a folder below the home or the workdir, not one of them")
    if inner.is_absolute() or ".." in parts or (text.startswith("~") and not below_home):
        raise ValueError("it is outside of the home and the workdir")
    if any(ord(letter) < 32 for letter in text) or not text.isprintable():
        raise ValueError("its name cannot be printed")
    if below_home and any(_covers(inner, PurePosixPath(private)) for private in _PRIVATE):
        raise ValueError("it may hold keys, logins, or what is spotguard's own")
    return (_HOME if below_home else "") + inner.as_posix()


def on_this_node(folder: str, *, home: str, workdir: str) -> Path:
    """Return where a folder that `cache_folder` returned is on this machine."""
    if folder.startswith(_HOME):
        return Path(home) / folder.removeprefix(_HOME)
    return Path(workdir) / folder


def _covers(folder: PurePosixPath, private: PurePosixPath) -> bool:
    return folder == private or private in folder.parents or folder in private.parents
