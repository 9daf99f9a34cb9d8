"""spotguard itself as a wheel, made from the installed package: nodes run the same version."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import os
import tempfile
import time
import zipfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import spotguard
from spotguard.errors import EnvironmentFailure

_WHEEL = "Wheel-Version: 1.0\nGenerator: spotguard\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_TEMPLATES = "task_templates"
_KEPT_S = 86_400.0
"""A launch that was given a wheel has long carried it to its nodes by then."""

if TYPE_CHECKING:
    from collections.abc import Iterator


def build_wheel(folder: Path) -> Path:
    """Return a wheel of this installation in a folder of `folder` named by its content.

    Costs a few file reads; what is there already is not written again. Any number of processes
    may do it at the same time. Wheels that no launch can need any more are deleted.

    Raises:
        EnvironmentFailure: the installation is broken, or `folder` cannot be written.
    """
    try:
        distribution = metadata.distribution("spotguard")
        members = _members(distribution)
        name = f"spotguard-{distribution.version}-py3-none-any.whl"
        final = folder / _digest(members) / name
        with _alone_in(folder):
            try:
                os.utime(final)  # from now on it is young
            except FileNotFoundError:
                _write(final, members)
            with contextlib.suppress(OSError):  # it is no launch's business
                _tidy(folder)
    except (OSError, metadata.PackageNotFoundError) as problem:
        raise EnvironmentFailure(
            f"spotguard cannot be packed for the nodes: {problem}",
            hint="reinstall it: pip install --force-reinstall spotguard",
        ) from problem
    return final


def _members(distribution: metadata.Distribution) -> dict[str, bytes]:
    package = Path(spotguard.__file__).parent
    members = _files(package, "spotguard")
    if (package.parent / _TEMPLATES).is_dir():  # a checkout; a wheel has them inside
        members |= _files(package.parent / _TEMPLATES, f"spotguard/{_TEMPLATES}")
    info = f"spotguard-{distribution.version}.dist-info"
    members[f"{info}/WHEEL"] = _WHEEL.encode()
    for file in ("METADATA", "entry_points.txt"):
        members[f"{info}/{file}"] = (distribution.read_text(file) or "").encode()
    lines = [f"{name},sha256={_hash(data)},{len(data)}\n" for name, data in members.items()]
    record = f"{info}/RECORD"
    members[record] = "".join([*lines, f"{record},,\n"]).encode()
    return members


def _files(folder: Path, prefix: str) -> dict[str, bytes]:
    return {
        f"{prefix}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _digest(members: dict[str, bytes]) -> str:
    record = next(data for name, data in members.items() if name.endswith("/RECORD"))
    return hashlib.sha256(record).hexdigest()[:12]


def _write(final: Path, members: dict[str, bytes]) -> None:
    final.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder, not in it: whoever looks for the wheel finds one file, or none.
    handle, draft = tempfile.mkstemp(dir=final.parent.parent, suffix=".new")
    try:
        with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as wheel:
            for name, data in members.items():
                entry = zipfile.ZipInfo(name)  # of 1980: the same files give the same bytes
                entry.external_attr = 0o644 << 16
                wheel.writestr(entry, data, zipfile.ZIP_DEFLATED)
        Path(draft).replace(final)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes from taking, writing or deleting a wheel inside the block."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _tidy(folder: Path) -> None:
    """Delete old wheels but the newest of each version, and what builds that died have left."""
    wheels = sorted(folder.glob("*/*.whl"), key=_taken_at)
    newest = {path.name: path for path in wheels}
    for path in [*wheels, *folder.glob("*.new")]:
        if path != newest.get(path.name) and time.time() - _taken_at(path) > _KEPT_S:
            path.unlink()
            with contextlib.suppress(OSError):  # there may be more in it
                path.parent.rmdir()


def _taken_at(path: Path) -> float:
    return path.stat().st_mtime
