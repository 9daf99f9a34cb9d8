"""A writer's lines grow in few objects: each line is there once, whatever happens to an upload."""

from __future__ import annotations

import gzip
import zlib

import pytest

from spotguard.errors import StoreError
from spotguard.events import keys
from spotguard.events.untrusted import Refused
from spotguard.storage.patterns import growing_lines
from spotguard.storage.patterns.growing_lines import GrowingObjects, read_piece, stored_pieces
from spotguard.testing import FaultyStore, MemoryStore
from spotguard.testing.stores import SimulatedCrash

FOLDER = keys.logs(1)


def writer(
    store: MemoryStore | FaultyStore, *, owner: int = 0, most_bytes: int | None = None
) -> GrowingObjects:
    """Return a writer that began at a certain instant."""
    return GrowingObjects(store, FOLDER, owner=owner, at=1e9, most_bytes=most_bytes)


def lines_of(store: MemoryStore, *, owner: int = 0) -> list[int]:
    """Return the numbers in a writer's lines, in the order of its pieces."""
    found = []
    for pieces in stored_pieces(store, FOLDER).values():
        for piece in pieces:
            read = read_piece(store, piece)
            if piece.name.owner == owner and read is not None:
                found += [int(line) for line in read.lines]
    return found


def test_a_line_stands_in_one_object_only() -> None:
    """However often the piece grows: the store holds one object for it, with all lines in order."""
    store = MemoryStore()
    objects = writer(store)
    for number in range(50):
        objects.add([b"%d" % number])
        objects.store()
        assert lines_of(store) == list(range(number + 1))
        assert len(list(store.list(FOLDER))) <= 2, "the piece, and for a moment the one before"
    assert objects.is_stored


def test_a_full_piece_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """No object grows without end, and three writers are told apart."""
    monkeypatch.setattr(growing_lines, "_FULL_LINES", 10)
    store = MemoryStore()
    for owner in range(3):
        objects = writer(store, owner=owner)
        for number in range(45):
            objects.add([b"%d" % number])
            objects.store()
    assert len(stored_pieces(store, FOLDER)) == 3
    for owner in range(3):
        assert lines_of(store, owner=owner) == list(range(45))
    assert len(list(store.list(FOLDER))) <= 3 * 6


@pytest.mark.same_everywhere
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_any_write_loses_no_stored_line_and_repeats_none(
    after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever the writer dies, between any two writes: what it had stored is there, once."""
    monkeypatch.setattr(growing_lines, "_FULL_LINES", 4)
    for crash in range(1, 40):
        inner = MemoryStore()
        store = FaultyStore(inner).crash_at(crash, after=after)
        objects, done = writer(store), 0
        try:
            for number in range(14):
                objects.add([b"%d" % number])
                objects.store()
                done = number + 1
        except SimulatedCrash:
            pass
        found = lines_of(inner)
        assert found == list(range(len(found)))
        assert done <= len(found) <= done + 1


@pytest.mark.parametrize("fault", ["refused", "torn", "unheard"])
def test_a_store_with_faults_has_each_line_once(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that are lost, uploads that are torn off, 503s: the next try mends it."""
    monkeypatch.setattr(growing_lines, "_FULL_LINES", 5)
    for nth in range(1, 12):
        inner = MemoryStore()
        store = FaultyStore(inner)
        if fault == "refused":
            store.fail("put", nth=nth, times=3)
        elif fault == "torn":
            store.tear(nth=nth, times=3)
        else:

            def lost(_: str) -> None:
                raise StoreError("the answer was lost")

            store.after("put", lost, nth=nth, times=3)
        objects = writer(store)
        for number in range(17):
            if not objects.is_full:
                objects.add([b"%d" % number])
            else:
                pytest.fail("it was stored, so it is not full any more")
            for _ in range(5):
                try:
                    objects.store()
                    break
                except StoreError:
                    continue
        assert lines_of(inner) == list(range(17))


def test_a_torn_upload_of_a_dead_writer_costs_only_what_it_added() -> None:
    """The piece as it was before is still there, and the one with more lines in it counts."""
    inner = MemoryStore()
    store = FaultyStore(inner)
    objects = writer(store)
    objects.add([b"%d" % number for number in range(1000)])
    objects.store()
    store.tear()
    objects.add([b"1000"])
    with pytest.raises(StoreError):
        objects.store()
    assert lines_of(inner) == list(range(1000))


def test_a_late_upload_does_no_harm() -> None:
    """A request that was given up may arrive after the next one: fewer lines never count."""
    inner = MemoryStore()
    objects = writer(inner)
    objects.add([b"0"])
    objects.store()
    (late,) = list(inner.list(FOLDER))
    content = inner.get(late.key, max_bytes=1000)
    objects.add([b"1"])
    objects.store()
    inner.put(late.key, content)
    assert lines_of(inner) == [0, 1]


def test_the_oldest_middle_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer without measure keeps its beginning and its end, and the gap can be seen."""
    monkeypatch.setattr(growing_lines, "_FULL_LINES", 10)
    store = MemoryStore()
    objects = writer(store, most_bytes=2000)
    for number in range(1000):
        objects.add([b"%d" % number])
        objects.store()
    found = lines_of(store)
    assert found[:10] == list(range(10))
    assert found[-20:] == list(range(980, 1000))
    assert len(found) < 500
    size = sum(info.size_bytes for info in store.list(FOLDER))
    assert size < 4000
    (pieces,) = stored_pieces(store, FOLDER).values()
    befores = [read.lines_before for p in pieces if (read := read_piece(store, p)) is not None]
    assert all(before == 10 * p.name.number for before, p in zip(befores, pieces, strict=True))


def test_what_others_wrote_is_refused_or_read_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bomb, no foreign form: `Refused`; damage in the middle costs what follows it."""
    import gzip

    def put(content: bytes) -> growing_lines.StoredPiece:
        store.put(keys.piece(FOLDER, owner=0, at=1e9, number=0, count=5), content)
        ((piece,),) = stored_pieces(store, FOLDER).values()
        return piece

    store = MemoryStore()
    monkeypatch.setattr(growing_lines, "_MOST_BYTES", 1 << 20)
    for bad in (b"", b"no gzip", gzip.compress(b"no JSON\n"), gzip.compress(b'{"schema":9}\n')):
        with pytest.raises(Refused):
            read_piece(store, put(bad))
    with pytest.raises(Refused, match="too large"):
        read_piece(store, put(gzip.compress(b"0" * (8 << 20))))
    head = gzip.compress(b'{"schema":1,"lines":0,"bytes":0}\n1\n2\n')
    read = read_piece(store, put(head + b"\x1f\x8bgarbage"))
    assert read is not None
    assert read.lines == (b"1", b"2")
    store.put(f"{FOLDER}foreign", b"")
    assert len(stored_pieces(store, FOLDER)) == 1


def test_a_piece_that_was_replaced_meanwhile_is_none() -> None:
    """Who reads looks again: a listing is old as soon as it is there."""
    store = MemoryStore()
    objects = writer(store)
    objects.add([b"0"])
    objects.store()
    ((piece,),) = stored_pieces(store, FOLDER).values()
    for info in list(store.list(FOLDER)):
        store.delete(info.key)
    assert read_piece(store, piece) is None


def test_what_follows_a_member_is_not_copied_for_each() -> None:
    """Reading many small members takes time by their number, not by its square."""
    copied = 0
    real_one = zlib.decompressobj

    class Counted:
        def __init__(self) -> None:
            self.real = real_one(31)

        def decompress(self, data: memoryview, most: int) -> bytes:
            nonlocal copied
            found = self.real.decompress(data, most)
            copied += len(self.real.unused_data)
            return found

        def __getattr__(self, name: str) -> object:
            return getattr(self.real, name)

    plain = [b"%d\n" % number for number in range(20_000)]
    raw = b"".join(gzip.compress(line, 1) for line in plain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zlib, "decompressobj", lambda _: Counted())
        assert growing_lines._unpacked(raw) == b"".join(plain)
    assert copied < len(plain) * 8192


def test_more_members_than_lines_are_none_of_ours() -> None:
    """Whoever may write to a store cannot hold up its readers by 200 000 empty members."""
    empty = gzip.compress(b"", 1)
    with pytest.raises(Refused, match="too many parts"):
        growing_lines._unpacked(empty * 200_000)
