"""Data without indices: streams that know their place, read by each rank for itself.

A stream is an iterable with `state_dict()` and `load_state_dict()` (the protocol of torchdata's
`StatefulDataLoader`, Hugging Face's `IterableDataset` and others). Where each one stands is saved
with every checkpoint. What that guarantees depends on what `run.loader` is given:

- A function `f(shard, shards)` that opens one shard of the data: there is a stream for each
  micro-batch of a step, so the data of step `s`, micro-batch `i` do not depend on the number of
  ranks. On any number of them, each stream is read in its order, nothing twice, nothing left out.
- One stream a rank, its own shard of the data: the same, on the same number of ranks. On another
  number nobody can tell what was read already, since the shards are others: the streams begin
  another pass, and a warning says so.
"""

from __future__ import annotations

from contextlib import ExitStack, closing, nullcontext
from typing import TYPE_CHECKING, Any

from spotguard.errors import UsageError
from spotguard.runtime.data.loader import Loader, Share
from spotguard.runtime.data.reading import READ
from spotguard.runtime.data.same_data import hash_of
from spotguard.runtime.state.inline_json import from_inline, to_inline
from spotguard.runtime.state.rng import kept_random_states, mix, seed_everything

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from contextlib import AbstractContextManager

_END = object()
_HASHED_EVERY = 4096
_SAME_EACH_TIME = (
    "let it be the same in each attempt: resampled=False, a seed= for whatever shuffles, sorted "
    "file names, the same files; or start a new run"
)


class Stream:
    """One stream, read pass after pass; it can be left and found again at any sample."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._passes = 0
        self._at_start = True
        self._items: Iterator[Any] | None = None

    def next(self) -> Any:
        """Return the next item; at the end of a pass the first one of the next.

        Raises:
            UsageError: there is nothing in it.
        """
        while True:
            if self._items is None:
                if self._at_start:
                    self._set_epoch()
                self._items = iter(self._source)
            item = next(self._items, _END)
            if item is not _END:
                self._at_start = False
                return item
            if self._at_start:
                raise UsageError(
                    f"run.loader: a whole pass over {type(self._source).__name__} gave nothing",
                    hint="an iter() after the end must begin anew, and each shard needs a sample",
                )
            self._begin_pass(self._passes + 1)

    @property
    def passes(self) -> int:
        """Passes that were read to their end."""
        return self._passes

    def state(self) -> dict[str, Any]:
        """Return as JSON where it is: before the item that `next` would give."""
        state = to_inline(self._source.state_dict(), type(self._source).__name__)
        return {"passes": self._passes, "state": state}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to where `state` was returned."""
        self._begin_pass(state["passes"])
        self._set_epoch()  # before: some take a state for one of their epoch only
        self._source.load_state_dict(from_inline(state["state"]))
        self._at_start = False

    def skip_to(self, passes: int) -> None:
        """Go to the beginning of a pass; only for a stream that was not read."""
        self._begin_pass(passes)

    def close(self) -> None:
        """Let go of the iterator, and with it of what it has open."""
        self._items = None

    def _begin_pass(self, passes: int) -> None:
        self._passes = passes
        self._items = None
        self._at_start = True

    def _set_epoch(self) -> None:
        inside = getattr(self._source, "dataset", None)
        for each in (self._source, inside):
            if each is not None and hasattr(each, "set_epoch"):
                each.set_epoch(self._passes)
                return


class Replayed:
    """An iterable without a state, whose place is how many items were read of this pass.

    To find it again, that many are read and thrown away. So it must give the same items in the same
    order in each attempt: webdataset's pipelines do with a seed, and without one they do not. The
    hashes of a few items are part of the place, and a resume compares.
    """

    def __init__(self, source: Any, seed: int | None) -> None:
        """`seed`: what those few are drawn with; None leaves the generators as they are."""
        refuse_resampled(source)
        self.dataset = source  # where `set_epoch` is looked for
        self._seed = seed
        self._read = 0
        self._hashes: dict[str, str | None] = {}
        """Of the first item of the pass, and of the last one that was looked at."""
        self._waiting: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        items, self._waiting = self._waiting, None
        if items is None:
            self._read, self._hashes = 0, {}
            items = self._begin()
        while (item := self._next(items)) is not _END:
            yield item

    def _begin(self) -> Iterator[Any]:
        with self._drawn_alike(0):  # workers take their seeds from here
            return iter(self.dataset)

    def _next(self, items: Iterator[Any]) -> Any:
        """Return the next item, some of which are hashed: the 1st, 2nd, 4th, 8th …"""
        number = self._read + 1
        if number & (number - 1) and number % _HASHED_EVERY:
            item = next(items, _END)
        else:
            with self._drawn_alike(number):
                item = next(items, _END)
            if item is not _END:
                first = {"1": self._hashes["1"]} if number > 1 and "1" in self._hashes else {}
                self._hashes = {**first, str(number): self._hash(item)}
        if item is not _END:
            self._read = number
        return item

    def _drawn_alike(self, number: int) -> AbstractContextManager[Any]:
        """Within it an item is drawn with a seed of its own, so that it is the same when replayed.

        Else what augments it would draw other numbers then than in the midst of a step.
        """
        if self._seed is None:
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(kept_random_states())
        seed_everything(mix(self._seed, number) ^ READ)
        return stack

    def _hash(self, item: Any) -> str | None:
        return hash_of(item) if self._seed is not None or "__key__" in _keys(item) else None

    def state_dict(self) -> dict[str, Any]:
        """Return how many items were read, and the hashes of some of them."""
        return {"read": self._read, "hashes": self._hashes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Read so many again: now, before the random generators are seeded for the next batch.

        Raises:
            UsageError: the stream is not what it was.
        """
        stored = dict(state.get("hashes") or {})  # earlier versions kept none
        self._read, self._hashes = 0, {}
        self._waiting = self._begin()
        while self._read < int(state["read"]):
            if self._next(self._waiting) is _END:
                raise _another_stream(f"has only {self._read} samples of {state['read']}")
            number = str(self._read)
            if stored.get(number, self._hashes.get(number)) != self._hashes.get(number):
                raise _another_stream(f"gives another sample as number {number} of its pass")


def _keys(item: Any) -> Any:
    return item if isinstance(item, dict) else ()


def _another_stream(what: str) -> UsageError:
    return UsageError(
        f"run.loader: the stream {what}, and replay=True finds its place by reading again what was "
        "read before",
        hint=_SAME_EACH_TIME,
    )


def refuse_resampled(source: Any) -> None:
    """Raise `UsageError` if a pipeline of webdataset's draws its shards anew in each process."""
    for stage in getattr(source, "pipeline", None) or ():
        name = type(stage).__name__
        if name == "ResampledShards" and not getattr(stage, "deterministic", False):
            raise UsageError(
                "run.loader: the stream is resampled, so that it is another one in each attempt, "
                "and replay=True would find no place in it",
                hint=_SAME_EACH_TIME,
            )


class LoaderOfStreams(Loader):
    """What all loaders without a length have in common."""

    def _found_again(self, source: Any, *, replay: bool) -> Any:
        """Return a stream that knows its place."""
        if not replay or has_state(source):
            return source
        return Replayed(source, self.seed if self._reseed else None)

    def epoch_of(self, step: int) -> int:
        """Return 0: a stream has no length, and passes of its own."""
        return 0

    def first_step_of(self, epoch: int) -> int:
        """Raise: a stream has no length."""
        raise no_epochs()

    def shares(self, step: int) -> list[Share]:
        """Return this rank's micro-batches of a step; samples are numbered through the run."""
        first = step * self.global_batch_size
        return self._shares(step, range(first, first + self.global_batch_size))


class StreamLoader(LoaderOfStreams):
    """Makes the micro-batches of each step of the next samples of streams.

    Every micro-batch is full: one that meets the end of a pass goes on with the next pass.
    """

    has_own_state = True

    def __init__(self, source: Any, *, replay: bool = False, **common: Any) -> None:
        super().__init__(**common)
        self.any_world = _opens_shards(source)
        numbers = range(self.rank, self.rank + 1)
        if self.any_world:
            shards = len(self._cut(self.global_batch_size).sizes)
            # A rank without work runs forward on the first one's data; it reads, but owns, nothing.
            numbers = self.ranges(0)[self.rank] or range(1)
            sources = {number: source(number, shards) for number in numbers}
        else:
            self._check_work()
            sources = {self.rank: source}
        for each in sources.values():
            check_source(each, replay=replay)
        self._in_batches = _gives_batches(next(iter(sources.values())))
        if self._in_batches:
            for each in sources.values():
                self._check_batches(each)
        self._streams = {
            number: Stream(self._found_again(each, replay=replay))
            for number, each in sources.items()
        }

    def identity(self) -> dict[str, Any]:
        """Return what must not change between a save and a resume."""
        return {
            "streams": "by micro-batch" if self.any_world else "by rank",
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.micro_batch_size,
            "seed": self.seed,
        }

    def read(self, first_step: int, last_step: int) -> Generator[tuple[Share, Any], None, None]:
        """Yield this rank's micro-batches; nothing is read before it is asked for."""
        with closing(self):
            for step in range(first_step, last_step):
                for share in self.shares(step):
                    if self._reseed:
                        seed_everything(mix(self.seed, step, share.number) ^ READ)
                    yield share, self._next(share)

    def close(self) -> None:
        """Let go of all iterators."""
        for stream in self._streams.values():
            stream.close()

    def keep(self, finished: int) -> None:
        """Take down where this rank's streams are; it costs their `state_dict()`."""
        owned = self._streams
        if self.any_world and not self.ranges(0)[self.rank]:
            owned = {}
        self.own = {str(number): stream.state() for number, stream in owned.items()}

    def restore(self, shared: Any, own: dict[int, Any], world_size: int) -> str | None:
        """Go on where the streams were; return a warning if nobody can tell where that is."""
        found = {int(number): state for each in own.values() for number, state in each.items()}
        same = self.any_world or world_size == self._world_size
        if same and all(number in found for number in self._streams):
            for number, stream in self._streams.items():
                stream.restore(found[number])
            return None
        passes = 1 + max((state["passes"] for state in found.values()), default=-1)
        for stream in self._streams.values():
            stream.skip_to(passes)
        why = (
            "their places are not in the checkpoint"
            if same
            else f"their places were saved by {world_size} ranks, now there are {self._world_size}"
        )
        return (
            f"the streams of data begin their pass {passes + 1}: {why}, so samples of the pass "
            "before may be read again, or be left out"
        )

    def _next(self, share: Share) -> Any:
        stream = self._streams[share.number if self.any_world else self.rank]
        if self._in_batches:
            return stream.next()
        return self.collate([stream.next() for _ in share.indices])

    def _check_work(self) -> None:
        count = len(self._cut(self.global_batch_size).sizes)
        if count < self._world_size:
            raise UsageError(
                f"run.loader: a step has {count} micro-batches, fewer than the "
                f"{self._world_size} ranks, so the data of some ranks would never be read",
                hint="lower micro_batch_size, or pass a function f(shard, shards) that opens a "
                "part of the data",
            )

    def _check_batches(self, source: Any) -> None:
        name = type(source).__name__
        if source.batch_size != self.micro_batch_size:
            raise UsageError(
                f"run.loader: {name} gives batches of {source.batch_size}, but micro_batch_size is "
                f"{self.micro_batch_size}",
                hint="use the same number for both",
            )
        if self.global_batch_size % self.micro_batch_size or not source.drop_last:
            raise UsageError(
                f"run.loader: {name} must give whole micro-batches only, or a short one would "
                "count like a whole one",
                hint="pass drop_last=True to it, and a global_batch_size that is a multiple",
            )


def no_epochs() -> UsageError:
    """Return what to say to whoever asks for epochs of a stream."""
    return UsageError(
        "run.steps: a stream has no length, so epochs= says nothing",
        hint="give total=, the optimizer steps in all",
    )


def is_stream(dataset: Any) -> bool:
    """Return True for what has no indices to choose from: iterables, loaders, a function."""
    from torch.utils.data import IterableDataset

    has_indices = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return isinstance(dataset, IterableDataset) or not has_indices


def refuse_indexed_options(**given: Any) -> None:
    """Raise `UsageError` if an option was given that only makes sense with indices."""
    names = [name for name, value in given.items() if value]
    if names:
        raise UsageError(
            f"run.loader: {', '.join(names)} cannot be used with a stream",
            hint="a stream has its own order; for worker processes pass a StatefulDataLoader",
        )


def _opens_shards(source: Any) -> bool:
    return callable(source) and not hasattr(source, "__iter__")


def _gives_batches(source: Any) -> bool:
    from torch.utils.data import DataLoader

    return isinstance(source, DataLoader)


def has_state(source: Any) -> bool:
    """Return True if a stream knows its place."""
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def check_source(source: Any, *, replay: bool) -> None:
    """Raise `UsageError` unless the place of a stream can be found again."""
    if hasattr(source, "__iter__") and (replay or has_state(source)):
        return
    raise UsageError(
        f"run.loader: {type(source).__name__} has no length and no indices, and no state_dict() "
        "either, so a resume could not find its place again",
        hint="pass a map-style dataset (with __len__ and __getitem__), or an iterable with "
        "state_dict() and load_state_dict(), such as torchdata's StatefulDataLoader; or "
        "replay=True",
    )
