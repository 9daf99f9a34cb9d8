"""A copy of the job's folder as it is now, named by its content: what all launches of a run get.

    HOME/code/<digest>/files/         what was copied
    HOME/code/<digest>/manifest.json  each file with its size and hash, links, and what was left

Two kinds: `all` is what SkyPilot would copy to nodes, `code` the Python files alone, for nodes that
are this machine's and have the folder itself. A copy is made aside and renamed, so it is whole or
not there; the same content is kept once, however many runs have it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import psutil

from spotguard.errors import EnvironmentFailure, SpecError
from spotguard.launch.cache.scan import is_secret_name
from spotguard.launch.workdir.copy_rules import SKYIGNORE, CopyRules, NotCopied
from spotguard.shared.units import format_bytes

ALL: Final = "all"
CODE: Final = "code"
SCHEMA: Final = 1
FILES: Final = "files"
EXTRA: Final = "extra"
SCRIPT: Final = "script"
_MANIFEST = "manifest.json"
_FOLDER = "code"
MOST_BYTES: Final = 10 * 10**9
"""Of all that is copied to nodes; rsync carries it to each of them, at each launch."""
_MUCH_BYTES = 10**8
"""From here on it is told how much it is, and what of."""
MOST_FILES: Final = 200_000
_MOST_CODE_FILES = 20_000
_MOST_CODE_LOOKS = 200_000
_MOST_CODE_BYTES = 10**8
_MOST_LEFT = 2_000
"""Of what stays behind; more are counted, and not named."""
_KEPT_S = 86_400.0
_PIECE = 1 << 20
_FICLONE = 0x40049409
"""Linux's order to let two files share their blocks until one of them is written to."""
_ENVIRONMENT = ("pyvenv.cfg", "conda-meta")
_NO_CODE = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages"})

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A copy that is whole."""

    folder: Path
    """Where it is, below the home."""
    digest: str
    kind: str
    marks: Mapping[str, str] = field(repr=False)
    """By their path: the hash of a file, where a link leads. `.git` is one entry."""
    size_bytes: int
    left: tuple[NotCopied, ...] = field(default=(), repr=False)
    """What stays behind, by rule; a folder stands for all that is in it."""
    leads_out: tuple[str, ...] = ()
    """Links that lead to nothing on a node."""
    notes: tuple[str, ...] = ()
    """What a person should know of it."""

    @property
    def files(self) -> Path:
        """The folder that stands for the job's own."""
        return self.folder / FILES

    @property
    def beside(self) -> Path:
        """The folder that stands for the script's own, where that is not below the job's."""
        return self.folder / SCRIPT

    def extra(self, source: Path) -> Path | None:
        """Return the copy of what does not lie in the job's folder; None if it was not copied."""
        copy = self.folder / extra_path(source)
        return copy if copy.exists() else None


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be copied."""

    workdir: Path
    kind: str
    least: tuple[Path, ...] = ()
    """Files of code that are copied in any case, of a folder that is too large to be searched."""
    script_folder: Path | None = None
    """Of a script that is not below the workdir: its own folder, whose code counts as well."""
    extra: tuple[Path, ...] = ()
    """Files that lie elsewhere, and are read at each launch."""
    skipped: tuple[Path, ...] = ()
    """Folders of results of spotguard's own, which no node needs a copy of."""
    mounted: tuple[str, ...] = ()
    """Places that nodes have beside the folder: a link may lead there."""
    most_bytes: int = MOST_BYTES


def take(wanted: Wanted, home: Path, tell: Tell) -> Snapshot:
    """Copy a folder as it is now, unless that copy is there already, and return the copy.

    Args:
        wanted: what is to be copied.
        home: spotguard's own folder, which is never copied.
        tell: hears how far it is, if it takes long.

    Raises:
        SpecError: it is more than nodes can be given; names the largest, and the way out.
        EnvironmentFailure: the folder cannot be read, or the home not written.
    """
    root = home / _FOLDER
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        _tidy(root)
        draft = Path(
            tempfile.mkdtemp(prefix=f".new-{socket.gethostname()}-{os.getpid()}-", dir=root)
        )
    except OSError as problem:
        raise EnvironmentFailure(
            f"{root} cannot be written: {problem.strerror}.",
            hint="set SPOTGUARD_HOME to a folder that you can write",
        ) from problem
    try:
        return _Copy(wanted, home, draft, tell).made()
    except OSError as problem:
        raise EnvironmentFailure(
            f"{wanted.workdir} cannot be copied: {problem.filename or root}: {problem.strerror}.",
            hint="make it readable, or list it in .skyignore; no node could have it either",
        ) from problem
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def load(home: Path, digest: str) -> Snapshot:
    """Return a copy that was made before.

    Raises:
        EnvironmentFailure: it is not there, or was changed.
    """
    folder = home / _FOLDER / digest
    try:
        body = json.loads((folder / _MANIFEST).read_text())
        return Snapshot(
            folder=folder,
            digest=digest,
            kind=str(body["kind"]),
            marks={str(path): str(mark) for path, mark in body["marks"].items()},
            size_bytes=int(body["size_bytes"]),
            left=tuple(NotCopied(**each) for each in body["left"]),
            leads_out=tuple(body["leads_out"]),
            notes=tuple(body["notes"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise EnvironmentFailure(
            f"The code of the run is not in {folder}, or was changed there: `spotguard resume RUN` "
            "goes on with what is in the job's folder now.",
        ) from problem


def path_of(home: Path, digest: str) -> Path:
    """Return where a copy is, if it is there."""
    return home / _FOLDER / digest


def extra_path(source: Path) -> str:
    """Return where below a copy a file lies that is not in the job's folder."""
    return f"{EXTRA}/{hashlib.sha256(os.fsencode(source)).hexdigest()[:12]}/{source.name}"


def digest_of(kind: str, marks: Mapping[str, str]) -> str:
    """Return the name of a copy: the same for the same content alone."""
    whole = hashlib.sha256(f"{SCHEMA} {kind}\0".encode())
    for path in sorted(marks):
        whole.update(f"{path}\0{marks[path]}\0".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()[:32]


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the paths whose content differs, or that are in one of them only; `.git` aside."""
    before, after = _as_seen(before), _as_seen(after)
    paths = {
        path
        for path in {*before, *after}
        if before.get(path) != after.get(path)
        and path.rpartition("/")[2] != ".git"
        and "/" not in (before.get(path), after.get(path))  # a folder that is empty
    }
    return sorted(paths)


def _as_seen(marks: Mapping[str, str]) -> dict[str, str]:
    """Return the marks by paths that are the same on each machine: a template lies anywhere."""
    return {
        f"//{EXTRA}/{path.rpartition('/')[2]}" if path.startswith(f"//{EXTRA}/") else path: mark
        for path, mark in marks.items()
    }


class _Copy:
    """One copy in the making."""

    def __init__(self, wanted: Wanted, home: Path, draft: Path, tell: Tell) -> None:
        self._wanted = wanted
        self._top = wanted.workdir.resolve()
        self._home = home.resolve()
        self._skipped = {self._home, *(path.resolve() for path in wanted.skipped)}
        self._draft = draft
        self._tell = tell
        self._rules = CopyRules(self._top)
        self._marks: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._left: list[NotCopied] = []
        self._leads_out: list[str] = []
        self._notes: list[str] = []
        self._size = 0

    def made(self) -> Snapshot:
        files = self._draft / FILES
        files.mkdir()
        if self._wanted.kind == CODE:
            self._copy_code(self._top, files, "")
            if self._wanted.script_folder is not None:
                beside = self._draft / SCRIPT
                beside.mkdir()
                self._copy_code(self._wanted.script_folder.resolve(), beside, f"//{SCRIPT}/")
        else:
            self._measure()
            self._copy_all(files)
        self._copy_extra()
        snapshot = self._described()
        body = {**asdict(snapshot), "schema": SCHEMA}
        del body["folder"], body["digest"]
        text = json.dumps(body, sort_keys=True)
        with (self._draft / _MANIFEST).open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        return self._put_in_place(snapshot)

    def _put_in_place(self, snapshot: Snapshot) -> Snapshot:
        final = snapshot.folder
        for _ in range(3):
            if (final / _MANIFEST).exists():
                with contextlib.suppress(OSError):
                    os.utime(final)  # from now on it is young
                return snapshot
            try:
                self._draft.rename(final)
            except OSError:  # somebody else was faster
                if not (final / _MANIFEST).exists():
                    shutil.rmtree(final, ignore_errors=True)
            else:
                return snapshot
        raise OSError(0, "another process changes it", str(final))

    def _described(self) -> Snapshot:
        digest = digest_of(self._wanted.kind, self._marks)
        return Snapshot(
            folder=self._draft.parent / digest,
            digest=digest,
            kind=self._wanted.kind,
            marks=self._marks,
            size_bytes=self._size,
            left=tuple(self._left),
            leads_out=tuple(self._leads_out),
            notes=tuple(self._notes),
        )

    # ------------------------------------------------------------ what SkyPilot copies

    def _measure(self) -> None:
        """Tell what the copy is made of, or refuse it, before a byte is read."""
        for count, (path, entry) in enumerate(self._walk("")):
            if count >= MOST_FILES:
                raise self._too_much(f"more than {MOST_FILES} files")
            if entry.is_file(follow_symlinks=False):
                self._sizes[path] = entry.stat(follow_symlinks=False).st_size
        total = sum(self._sizes.values())
        if total > self._wanted.most_bytes:
            raise self._too_much(format_bytes(total))
        free = shutil.disk_usage(self._draft).free
        if total > free:
            raise EnvironmentFailure(
                f"{self._top} has {format_bytes(total)} for the nodes, and the disk of "
                f"{self._home} {format_bytes(free)} free.",
                hint="list what no node needs in .skyignore, or set SPOTGUARD_HOME to another disk",
            )
        if total >= _MUCH_BYTES:
            self._notes.append(
                f"each launch copies {format_bytes(total)} of {self._top} to each node "
                f"({self._largest()}); what no node needs belongs into .skyignore, data to "
                "--file-mount"
            )
            self._tell(f"copying {format_bytes(total)} of {self._top} ...")
        self._left = []
        self._leads_out = []

    def _too_much(self, what: str) -> SpecError:
        return SpecError(
            "workdir",
            f"{self._top} holds {what}, which would be copied to each node at each launch "
            f"({self._largest()})",
            hint="list it in .skyignore (one pattern a line), and bring data by "
            "--file-mount /data=s3://...",
        )

    def _largest(self) -> str:
        """Return what most of it lies in: folders of the top, and files beside them."""
        parts: dict[str, int] = {}
        for path, size in self._sizes.items():
            first, slash, _ = path.partition("/")
            parts[f"{first}{slash}"] = parts.get(f"{first}{slash}", 0) + size
        most = sorted(parts.items(), key=lambda part: -part[1])[:3]
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in most)

    def _walk(self, folder: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield all that is copied, folders before what is in them; what is left is noted."""
        with os.scandir(self._top / folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder and Path(entry.path) in self._skipped:
                continue  # journals, keys, checkpoints: no node's business
            left = self._rules.left_behind(path, is_folder=is_folder)
            if left is not None and path != ".skyignore":  # without it other rules would count
                if len(self._left) < _MOST_LEFT:
                    self._left.append(left)
                continue
            yield path, entry
            if is_folder:
                yield from self._walk(path)

    def _copy_all(self, files: Path) -> None:
        filled = set[str]()
        git = dict[str, list[str]]()
        for path, entry in self._walk(""):
            target = files / path
            above = path.rpartition("/")[0]
            mark = ""
            if entry.is_symlink():
                mark = self._copy_link(path, target)
            elif entry.is_dir(follow_symlinks=False):
                target.mkdir()
                self._note_environment(path, entry)
            elif entry.is_file(follow_symlinks=False):
                mark = self._copy_file(Path(entry.path), target)
                self._note_secret(path)
                self._note_unread(path)
            else:
                continue  # a socket or a pipe is no node's
            filled.add(above)
            inside = _git_above(path)
            if inside is not None:
                git.setdefault(inside, []).append(f"{path}\0{mark}")
            elif mark:
                self._marks[path] = mark
        for folder in (p for p in files.rglob("*") if p.is_dir() and not p.is_symlink()):
            seen = folder.relative_to(files).as_posix()
            if seen not in filled and _git_above(seen) is None:
                self._marks[seen] = "/"
        for path, inner in git.items():  # its own files change with each look at them
            joined = "\n".join(sorted(inner)).encode("utf-8", "surrogateescape")
            self._marks[path] = hashlib.sha256(joined).hexdigest()[:32]

    def _copy_link(self, path: str, target: Path) -> str:
        leads = os.readlink(self._top / path)  # noqa: PTH115 - as it is written
        target.symlink_to(leads)
        seen = os.path.normpath(os.path.join(os.path.dirname(path), leads))  # noqa: PTH118, PTH120
        goes_out = seen == ".." or seen.startswith(("/", "../"))
        on_mount = any(seen == m or seen.startswith(f"{m}/") for m in self._wanted.mounted)
        if (goes_out and not on_mount) or not (self._top / path).exists():
            self._leads_out.append(path)
        return f"-> {leads}"

    def _note_environment(self, path: str, entry: os.DirEntry[str]) -> None:
        if any(os.path.exists(f"{entry.path}/{name}") for name in _ENVIRONMENT):  # noqa: PTH110
            self._notes.append(
                f"{path}/ is an environment of this machine's Python: it is copied to the nodes, "
                "and of no use there; list it in .skyignore"
            )

    def _note_unread(self, path: str) -> None:
        if path.endswith(f"/{SKYIGNORE}") and not (self._top / SKYIGNORE).exists():
            self._notes.append(
                f"{path} is not read, for there is no {SKYIGNORE} at the top: SkyPilot then goes "
                "by .gitignore alone; an empty one there has it read"
            )

    def _note_secret(self, path: str) -> None:
        if is_secret_name(path.rpartition("/")[2]) and _git_above(path) is None:
            self._notes.append(
                f"{path} is named as a file of secrets, and is copied to the nodes; list it in "
                ".skyignore if they need it not, and give variables by --env"
            )

    # ------------------------------------------------------------ what Python imports

    def _copy_code(self, top: Path, files: Path, prefix: str) -> None:
        """Copy the Python files, or those that the script imports where there are too many."""
        try:
            found = sorted(self._code_below(top))
        except _TooLarge as problem:
            found = sorted(
                path.relative_to(top).as_posix()
                for path in (each.resolve() for each in self._wanted.least)
                if path.is_relative_to(top)
            )
            self._notes.append(
                f"{top} has {problem}: the code of the run is the {len(found)} files that "
                "the script imports; other files are read as they are at each launch"
            )
        for path in found:
            target = files / path
            target.parent.mkdir(parents=True, exist_ok=True)
            self._marks[f"{prefix}{path}"] = self._copy_file(top / path, target)

    def _code_below(self, top: Path) -> Iterator[str]:
        to_do, looks, count, size = [""], 0, 0, 0
        while to_do:
            here = to_do.pop()
            with contextlib.suppress(PermissionError), os.scandir(top / here) as found:
                for entry in sorted(found, key=lambda each: each.name):
                    looks += 1
                    path = f"{here}/{entry.name}" if here else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if not self._has_no_code(entry):
                            to_do.append(path)
                    elif entry.name.endswith(".py") and entry.is_file():
                        count += 1
                        size += entry.stat().st_size
                        yield path
                    if looks > _MOST_CODE_LOOKS:
                        raise _TooLarge(f"more than {_MOST_CODE_LOOKS} files")
                    if count > _MOST_CODE_FILES or size > _MOST_CODE_BYTES:
                        raise _TooLarge(f"{count} Python files of {format_bytes(size)}")

    def _has_no_code(self, folder: os.DirEntry[str]) -> bool:
        if folder.name.startswith(".") or folder.name in _NO_CODE:
            return True
        return Path(folder.path) == self._home or any(
            os.path.exists(f"{folder.path}/{name}")  # noqa: PTH110
            for name in _ENVIRONMENT
        )

    # ------------------------------------------------------------ files

    def _copy_extra(self) -> None:
        for source in self._wanted.extra:
            seen = extra_path(source)
            target = self._draft / seen
            target.parent.mkdir(parents=True)
            self._marks[f"//{seen}"] = self._copy_file(source, target)

    def _copy_file(self, source: Path, target: Path) -> str:
        """Copy a file with its mode and time; return the hash of what was copied."""
        digest = hashlib.sha256()
        with source.open("rb") as file, target.open("xb") as copy:
            kept = os.fstat(file.fileno())
            try:
                fcntl.ioctl(copy.fileno(), _FICLONE, file.fileno())
                is_clone = True
            except OSError:
                is_clone = False
            read = target.open("rb") if is_clone else contextlib.nullcontext(file)
            with read as bytes_of:
                while piece := bytes_of.read(_PIECE):
                    digest.update(piece)
                    self._size += len(piece)
                    if not is_clone:
                        copy.write(piece)
            os.fchmod(copy.fileno(), stat.S_IMODE(kept.st_mode) | stat.S_IRUSR)
        os.utime(target, ns=(kept.st_atime_ns, kept.st_mtime_ns))
        runs = "x" if kept.st_mode & stat.S_IXUSR else ""
        return f"{runs}{digest.hexdigest()[:32]}"


class _TooLarge(Exception):
    """A folder has more than is searched."""


def _git_above(path: str) -> str | None:
    """Return the `.git` that a path is in, or is; None if it is in none."""
    parts = path.split("/")
    if ".git" not in parts:
        return None
    return "/".join(parts[: parts.index(".git") + 1])


def _tidy(root: Path) -> None:
    """Delete what died half-made, and copies that no run has, a day after they were wanted."""
    host = socket.gethostname()
    kept = {
        os.readlink(link).rpartition("/")[2]  # noqa: PTH115
        for of in ("runs", "sweeps")
        for link in root.parent.glob(f"{of}/*/{_FOLDER}")
        if link.is_symlink()
    }
    for path in root.iterdir():
        with contextlib.suppress(OSError):
            old = time.time() - path.lstat().st_mtime > _KEPT_S
            maker = path.name.removeprefix(f".new-{host}-").partition("-")[0]
            dead = path.name.startswith(f".new-{host}-") and not psutil.pid_exists(int(maker or 0))
            if dead or (old and path.name not in kept):
                shutil.rmtree(path, ignore_errors=True)


def keep_for(run: Path, digest: str) -> None:
    """Keep a copy for as long as the folder of a run is there; the run's `code` leads to it."""
    link = run / _FOLDER
    fresh = run / f".{_FOLDER}.new"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(f"../../{_FOLDER}/{digest}")
    fresh.replace(link)


def kept_by(run: Path) -> str | None:
    """Return the name of the copy that the folder of a run keeps; None if it keeps none."""
    link = run / _FOLDER
    return link.readlink().name if link.is_symlink() else None


def copy_for_trial(snapshot: Snapshot, to: Path) -> None:
    """Copy a snapshot for somebody who may write into it; links that lead out lead nowhere."""
    shutil.copytree(snapshot.files, to, symlinks=True, copy_function=_cloned)
    for path in snapshot.leads_out:
        (to / path).unlink()
        (to / path).symlink_to(f"/not-on-a-node/{os.readlink(snapshot.files / path)}")  # noqa: PTH115


def _cloned(source: str, target: str) -> str:
    with open(source, "rb") as file, open(target, "xb") as copy:  # noqa: PTH123
        try:
            fcntl.ioctl(copy.fileno(), _FICLONE, file.fileno())
        except OSError:
            shutil.copyfileobj(file, copy, _PIECE)
    shutil.copystat(source, target)
    return target
