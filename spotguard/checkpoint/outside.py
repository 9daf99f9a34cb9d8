"""A frozen base in files of its own, outside the run store: referred to by hash, never copied.

Of such a base the store holds a shard's header alone. Its `outside` entry says of each tensor in
which file it lies, under which name there, and what its bytes hash to:

    [{"path": "/data/base.safetensors", "tensors": {"model.base.weight": ["weight", "<hash>"]}}]
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from spotguard.checkpoint.header import parse_header, parse_metadata
from spotguard.checkpoint.strict_json import loads_plain
from spotguard.checkpoint.tensors import MAX_HEADER_BYTES
from spotguard.errors import BaseNotFound, DamagedCheckpoint, UsageError
from spotguard.shared.paths import expanded
from spotguard.storage.base import Reads
from spotguard.storage.buffers import targets_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from io import BufferedReader

    from spotguard.checkpoint.strict_json import Json
    from spotguard.checkpoint.tensors import TensorInfo
    from spotguard.storage.base import Target

ENTRY = "outside"
"""Of a header's `__metadata__`."""
_LENGTH_BYTES = 8
_BUFFER_BYTES = 1 << 20
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/|.*://", re.DOTALL)
"""A path that was made of a URL has one slash there."""
_READS = Reads(threads=2, size_bytes=4 << 20)
_WAY_OUT = (
    "put the file back as it was, or say where it is now: "
    "run.track(model=model, base=...); a new run begins without the checkpoint"
)


class OutsidePlace(NamedTuple):
    """Where the bytes of a tensor, or of a part of one, lie outside."""

    path: Path
    name: str
    """Of the tensor in the file."""
    start: int
    """Where they begin in the file."""
    digest: str


class _Tensor(NamedTuple):
    path: Path
    name: str
    start: int


class BaseFiles:
    """Safetensors files that a script names as its base: their headers now, bytes when asked.

    What is asked for is found by its contents, whatever name it has there: a wrapper around a
    model renames its parameters.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]] = ()) -> None:
        """Read the headers of the files, or of all such files in a folder.

        Raises:
            UsageError: one is not there, or no safetensors file.
        """
        self._tensors: dict[tuple[str, tuple[int, ...]], list[_Tensor]] = {}
        self._digests: dict[tuple[_Tensor, int, int], str] = {}
        self.paths = list(dict.fromkeys(each for path in paths for each in _files_at(path)))
        for path in self.paths:
            self._add(path)

    def may_hold(self, info: TensorInfo) -> bool:
        """Return True if a tensor, or the part of one, is found if its bytes are there."""
        return (info.dtype, info.global_shape or info.shape) in self._tensors and (
            info.offsets is None
            or (not any(info.offsets[1:]) and info.shape[1:] == (info.global_shape or ())[1:])
        )

    def find(self, info: TensorInfo, digest: str, name: str = "") -> OutsidePlace | None:
        """Return where bytes of this hash lie in a tensor of this form, None if nowhere.

        Reads tensors of the form until they are found, those of that name first; each once.

        Args:
            info: A tensor, or some first dimension's rows of one, as a sharded model has them.
            digest: XXH3-128 of the bytes.
            name: Of the tensor in the file, if that is known.

        Raises:
            OSError: a file cannot be read any more.
        """
        if not self.may_hold(info):
            return None
        rows = info.shape[0] if info.offsets else 1
        first = info.offsets[0] * (info.size_bytes // rows) if info.offsets else 0
        candidates = self._tensors[info.dtype, info.global_shape or info.shape]
        for tensor in sorted(candidates, key=lambda tensor: tensor.name != name):
            if self._digest(tensor, first, info.size_bytes) == digest:
                return OutsidePlace(tensor.path, tensor.name, tensor.start + first, digest)
        return None

    def _add(self, path: Path) -> None:
        try:
            with _opened(path) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                head = file.read(_LENGTH_BYTES)
                length = int.from_bytes(head, "little")
                head += file.read(length) if length <= MAX_HEADER_BYTES else b""
            tensors = parse_header(memoryview(head), size_bytes, what=str(path))
        except OSError as problem:
            raise UsageError(
                f"base: {path} cannot be read: {problem.strerror}",
                hint="name the file, a list of files, or a folder of *.safetensors",
            ) from problem
        except DamagedCheckpoint as problem:
            raise UsageError(
                f"base: {path} is no safetensors file that can be referred to: {problem.message}",
                hint="save the base by safetensors.torch.save_file, or leave base= out: "
                'frozen="skip" alone stores it once',
            ) from problem
        for name, info in tensors.items():
            same_form = self._tensors.setdefault((info.dtype, info.shape), [])
            same_form.append(_Tensor(path, name, info.start))

    def _digest(self, tensor: _Tensor, first: int, size_bytes: int) -> str:
        asked = (tensor, first, size_bytes)
        if asked not in self._digests:
            self._digests[asked] = _hash_of(tensor.path, tensor.start + first, size_bytes)
        return self._digests[asked]


class OutsideData:
    """The data of a shard of which the store has the header: read from the files it names."""

    def __init__(
        self, head: memoryview, tensors: Mapping[str, TensorInfo], named: BaseFiles, *, what: str
    ) -> None:
        """`named` are the script's files now, `what` names the shard.

        Raises:
            DamagedCheckpoint: the header does not say where each tensor lies.
        """
        self._recorded = _recorded(parse_metadata(head, what=what).get(ENTRY, "[]"), what)
        self._tensors = sorted(tensors.items(), key=lambda item: item[1].start)
        self._named = named
        self._places: dict[str, OutsidePlace] = {}
        self._files: dict[Path, BaseFiles] = {}
        if {name for name, info in self._tensors if info.size_bytes} - set(self._recorded):
            raise DamagedCheckpoint(f"{what} does not say where all of its tensors lie")

    def best_reads(self, _key: str) -> Reads:
        """Return how files of this machine are read."""
        return _READS

    def get_into(self, _key: str, offset: int, into: Target) -> None:
        """Fill `into` with the shard's bytes from `offset`.

        Raises:
            BaseNotFound: a file is missing, or not what it was.
        """
        views = targets_of(into)
        end = offset + sum(map(len, views))
        for name, info in self._tensors:
            low, high = max(offset, info.start), min(end, info.end)
            if low < high:
                place = self._place(name, info)
                at = place.start + low - info.start
                try:
                    _fill(place.path, at, _taken(views, high - low))
                except OSError as problem:
                    raise _lost(place.path, name, str(problem)) from problem

    def _place(self, name: str, info: TensorInfo) -> OutsidePlace:
        if name not in self._places:
            path, inside, digest = self._recorded[name]
            try:
                found = self._named.find(info, digest, inside)
                if found is None and path.is_file():
                    found = self._as_recorded(path).find(info, digest, inside)
            except (OSError, UsageError) as problem:
                raise _lost(path, name, str(problem)) from problem
            if found is None:
                changed = path.is_file() or self._named.paths
                why = "no named file holds it as it was" if changed else "the file is missing"
                raise _lost(path, name, why)
            self._places[name] = found
        return self._places[name]

    def _as_recorded(self, path: Path) -> BaseFiles:
        """Return the file that the header names, which nobody names now."""
        if path not in self._files:
            self._files[path] = BaseFiles([path])
        return self._files[path]


def entry_of(places: Mapping[str, OutsidePlace]) -> str:
    """Return what a header says of where its tensors lie."""
    files: dict[str, dict[str, Json]] = {}
    for name, place in places.items():
        files.setdefault(str(place.path), {})[name] = [place.name, place.digest]
    told = [{"path": path, "tensors": tensors} for path, tensors in files.items()]
    return json.dumps(told, separators=(",", ":"))


def _recorded(text: str, what: str) -> dict[str, tuple[Path, str, str]]:
    """Return for each tensor its file, its name there, and its hash."""
    files = loads_plain(text.encode("utf-8", "replace"), what=f"{what}: {ENTRY}")
    found = {}
    try:
        for file in files:
            path = Path(file["path"])
            for name, (inside, digest) in file["tensors"].items():
                found[name] = (path, str(inside), digest)
    except (TypeError, KeyError, ValueError, AttributeError) as problem:
        raise DamagedCheckpoint(f"{what}: {ENTRY} is not a list of files") from problem
    return found


def _lost(path: Path, name: str, why: str) -> BaseNotFound:
    return BaseNotFound(
        f"the checkpoint refers to {path} for the frozen tensor {ascii(name)[1:-1][:80]}: {why}",
        hint=_WAY_OUT,
    )


def _files_at(named: str | os.PathLike[str]) -> Iterator[Path]:
    if _URL.match(os.fspath(named)):  # it may hold a password, so it is not repeated
        raise UsageError(
            "base: what is given is a URL, and a base is read from files of this machine",
            hint="copy it here, and name the file, a list of files, or a folder of *.safetensors",
        )
    try:
        path = expanded(named).absolute()
    except RuntimeError as problem:  # ~ of a user that this machine does not know
        raise UsageError(f"base: {named} is no path on this machine: {problem}") from problem
    if not path.is_dir():
        yield path
        return
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise UsageError(f"base: the folder {path} holds no *.safetensors files")
    yield from found


def _opened(path: Path) -> BufferedReader:
    """Return a plain file, open; a pipe would have no end."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "no plain file")
    return file


def _hash_of(path: Path, start: int, size_bytes: int) -> str:
    digest, left = xxhash.xxh3_128(), size_bytes
    with _opened(path) as file:
        file.seek(start)
        while left and (part := file.read(min(left, _BUFFER_BYTES))):
            digest.update(part)
            left -= len(part)
    return digest.hexdigest()


def _fill(path: Path, start: int, views: list[memoryview]) -> None:
    with _opened(path) as file:
        file.seek(start)
        for view in views:
            if file.readinto(view) < len(view):
                raise OSError(errno.EIO, "it ends too early")


def _taken(views: list[memoryview], size_bytes: int) -> list[memoryview]:
    """Take the first so many bytes off `views`, and return them."""
    taken = []
    while size_bytes:
        view = views.pop(0)
        if len(view) > size_bytes:
            views.insert(0, view[size_bytes:])
            view = view[:size_bytes]
        taken.append(view)
        size_bytes -= len(view)
    return taken
