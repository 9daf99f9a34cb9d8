"""The manifest: what a checkpoint consists of. Once it is stored, the checkpoint exists.

    {"checksum":"sha256:<64 hex digits>","manifest":{...}}

The checksum covers the bytes of the inner object exactly as they stand in the file.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spotguard.checkpoint import strict_json
from spotguard.checkpoint.fields import Fields
from spotguard.checkpoint.reading import ShardReader, check_intact
from spotguard.checkpoint.tensors import ShardInfo
from spotguard.errors import (
    AlreadyExists,
    DamagedCheckpoint,
    ForeignCheckpoint,
    NotFound,
    StateMismatch,
    UnsupportedState,
)
from spotguard.events import keys
from spotguard.events.keys import MAX_ATTEMPT
from spotguard.events.states import CheckpointKind
from spotguard.events.untrusted import Refused
from spotguard.shared.units import to_iso
from spotguard.storage.remote.thread_pool import Crew
from spotguard.storage.small_objects import get_small

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spotguard.checkpoint.outside import BaseFiles
    from spotguard.checkpoint.strict_json import Json
    from spotguard.checkpoint.tensors import TensorInfo
    from spotguard.storage.base import ObjectStore

SCHEMA = 3
"""The newest that is read. A checkpoint is written as the least that it needs: 1; 2 if it has a
base; 3 if data of that lies outside the store."""
MAX_MANIFEST_BYTES = 200_000_000
"""A thousand ranks with shards of many gigabytes need 146 MB; larger ones are not even fetched."""
MAX_STEP = 10**12 - 1
PREFIX_PATTERN = r"checkpoints/[0-9]{12}-[0-9]{6}/"

_HEADERS_AT_ONCE = 16
_START = b'{"checksum":"sha256:'
_MIDDLE = b'","manifest":'
_BODY_AT = len(_START) + 64 + len(_MIDDLE)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything needed to go on, except the tensors' bytes, which it proves."""

    run_id: str
    attempt: int
    step: int
    """Steps finished when it was taken."""
    kind: CheckpointKind
    created_at: float
    """Seconds since the epoch."""
    parent: str | None
    """Prefix of the checkpoint before it in the run's history, None for the first."""
    world_size: int
    shards: tuple[ShardInfo, ...]
    state: Json
    """The tracked objects as a tree that names tensors; means something to the runtime only."""
    ranks: dict[str, Json] = field(default_factory=dict)
    """Rank number as text -> what is that rank's own, such as its random state."""
    counters: dict[str, Json] = field(default_factory=dict)
    """`train_s`, `epoch`, `total_steps` and the like."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of spotguard, torch and Python: who wrote it."""

    def __post_init__(self) -> None:
        """Refuse numbers that no key can hold."""
        if not 0 <= self.step <= MAX_STEP:
            raise ValueError(f"Manifest.step is {self.step}, allowed are 0 to {MAX_STEP}")
        if not 1 <= self.attempt <= MAX_ATTEMPT:
            raise ValueError(f"Manifest.attempt is {self.attempt}, allowed are 1 to {MAX_ATTEMPT}")

    @property
    def prefix(self) -> str:
        """Return the checkpoint's prefix, with its trailing slash."""
        return keys.checkpoint(self.step, self.attempt)

    @property
    def schema(self) -> int:
        """Return the least version of this form that a reader must know."""
        if any(base.outside for base in self.bases):
            return 3
        return 2 if self.bases else 1

    @property
    def own(self) -> tuple[ShardInfo, ...]:
        """Return the shards that lie in the checkpoint's own folder."""
        return tuple(shard for shard in self.shards if shard.folder is None)

    @property
    def bases(self) -> tuple[ShardInfo, ...]:
        """Return the shards that other checkpoints refer to as well."""
        return tuple(shard for shard in self.shards if shard.folder is not None)

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the checkpoint's own shards: what it takes beside others."""
        return sum(shard.size_bytes for shard in self.own)

    def to_json(self) -> bytes:
        """Return the manifest as the bytes the store keeps.

        Raises:
            UnsupportedState: state, ranks or counters hold something that JSON cannot.
        """
        body = strict_json.dumps(
            {
                "schema": self.schema,
                **self.__dict__,
                "kind": str(self.kind),
                "created_at": to_iso(self.created_at),
                "shards": [shard.to_json() for shard in self.shards],
            },
            what="manifest",
        )
        return b"".join([_START, _digest(body), _MIDDLE, body, b"}"])

    @classmethod
    def from_json(cls, raw: bytes, *, what: str = "manifest") -> Manifest:
        """Return the manifest that `to_json` wrote, every field checked.

        Raises:
            DamagedCheckpoint: a byte is not what was written, or a field makes no sense.
            StateMismatch: a newer spotguard wrote it.
        """
        fields = Fields(strict_json.loads(_body(raw, what), what=what), what)
        schema = fields.integer("schema", low=1)
        if schema > SCHEMA:
            raise StateMismatch(
                f"{what} has schema {schema}, this version of spotguard reads up to {SCHEMA}",
                hint="pip install --upgrade spotguard",
            )
        kinds = "|".join(kind.value for kind in CheckpointKind)
        return cls(
            run_id=fields.text("run_id"),
            attempt=fields.integer("attempt", low=1, high=MAX_ATTEMPT),
            step=fields.integer("step", high=MAX_STEP),
            kind=CheckpointKind(fields.text("kind", kinds)),
            created_at=fields.instant("created_at"),
            parent=fields.maybe_text("parent", PREFIX_PATTERN),
            world_size=fields.integer("world_size", low=1),
            shards=_shards(fields),
            state=fields.json("state"),
            ranks=fields.object("ranks"),
            counters=fields.object("counters"),
            versions=fields.texts("versions"),
        )


def commit(store: ObjectStore, manifest: Manifest) -> str:
    """Store the manifest: from here on the checkpoint exists. Return its prefix.

    All shards must be stored before. Committing the very same manifest again is fine: that is
    what a repeated request after a lost answer looks like.

    Raises:
        AlreadyExists: another manifest is there.
        UnsupportedState: the manifest holds something that JSON cannot.
    """
    raw = manifest.to_json()
    if len(raw) > MAX_MANIFEST_BYTES:
        raise UnsupportedState(
            f"the manifest has {len(raw)} bytes, and nobody reads more than {MAX_MANIFEST_BYTES}",
            hint="track fewer objects, or keep what is large in tensors",
        )
    try:
        store.put(keys.manifest(manifest.prefix), raw, if_absent=True)
    except AlreadyExists as taken:
        if not _is_stored(store, keys.manifest(manifest.prefix), raw):
            raise taken from None
    return manifest.prefix


def load_manifest(store: ObjectStore, prefix: str) -> Manifest:
    """Return the manifest of the checkpoint at `prefix`; its shards are not looked at.

    Raises:
        DamagedCheckpoint: it is missing, damaged, or belongs elsewhere.
        StateMismatch: a newer spotguard wrote it.
    """
    key = keys.manifest(prefix)
    try:
        raw = get_small(store, key, most_bytes=MAX_MANIFEST_BYTES)
    except NotFound:
        raise DamagedCheckpoint(f"{key} is missing") from None
    except Refused as problem:
        raise DamagedCheckpoint(str(problem)) from None
    manifest = Manifest.from_json(raw, what=key)
    if manifest.prefix != prefix:
        raise DamagedCheckpoint(f"{key} belongs to {manifest.prefix}")
    return manifest


def check_run(manifest: Manifest, run_id: str) -> None:
    """Raise `ForeignCheckpoint` if it is of another run, and was copied into this one's folder."""
    if manifest.run_id != run_id:
        raise ForeignCheckpoint(
            f"{manifest.prefix} belongs to run {ascii(manifest.run_id)[1:-1]}, "
            f"not to {run_id}, in whose folder it is",
            hint="use it in the folder of its own run; if the whole folder was renamed, "
            "give it its old name back",
        )


def shard_readers(
    store: ObjectStore,
    manifest: Manifest,
    *,
    near: ObjectStore | None = None,
    named: BaseFiles | None = None,
) -> list[ShardReader]:
    """Return a reader of each shard, which asks the store `near` first; nothing is read yet.

    `named` are the files where a base that lies outside is now.
    """
    return [
        ShardReader(store, manifest.prefix, shard, near=near, named=named)
        for shard in manifest.shards
    ]


def tensors_that_count(readers: Sequence[ShardReader]) -> list[dict[str, TensorInfo]]:
    """Return what each shard holds; what a base holds is superseded by a checkpoint's own shards.

    Raises:
        DamagedCheckpoint: a header is not as the manifest says.
    """
    with Crew(_HEADERS_AT_ONCE, "spotguard-headers") as crew:  # each is two requests
        headers = crew.map(lambda reader: reader.tensors, readers)
    pairs = list(zip(readers, headers, strict=True))
    own: dict[str, set[tuple[int, ...] | None]] = {}
    for reader, found in pairs:
        if reader.info.folder is None:
            for name, info in found.items():
                own.setdefault(name, set()).add(info.offsets)

    def counts(name: str, info: TensorInfo) -> bool:
        # Of a tensor that is spread over ranks, one rank may have stored its part anew.
        newer = own.get(name, set())
        parts = info.offsets is not None and None not in newer
        return info.offsets not in newer if parts else not newer

    return [
        {name: info for name, info in found.items() if counts(name, info)}
        if reader.info.folder
        else found
        for reader, found in pairs
    ]


def check_shards_present(store: ObjectStore, manifest: Manifest) -> None:
    """Raise `DamagedCheckpoint` if a shard is missing or has another size; reads no data."""
    for reader in shard_readers(store, manifest):
        reader.check_size()


def check_shards_intact(store: ObjectStore, manifest: Manifest) -> None:
    """Raise `DamagedCheckpoint` if any byte of any shard is not as promised; reads all data."""
    for reader in shard_readers(store, manifest):
        check_intact(reader)


def _is_stored(store: ObjectStore, key: str, raw: bytes) -> bool:
    try:
        return get_small(store, key, most_bytes=len(raw)) == raw
    except Refused:
        return False


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode()


def _body(raw: bytes, what: str) -> bytes:
    """Return the proven bytes of the inner object."""
    body = raw[_BODY_AT:-1]
    if raw != b"".join([_START, _digest(body), _MIDDLE, body, b"}"]):
        raise DamagedCheckpoint(f"{what} is damaged: its bytes are not those that were written")
    return body


def _shards(fields: Fields) -> tuple[ShardInfo, ...]:
    shards = tuple(
        ShardInfo.from_json(item, f"{fields.where}: shard {index}")
        for index, item in enumerate(fields.items("shards"))
    )
    files = Counter((shard.folder, shard.file) for shard in shards)
    if len(files) != len(shards):
        fields.refuse("shards", "shards with different files")
    return shards
