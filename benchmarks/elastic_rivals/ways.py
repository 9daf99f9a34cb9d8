"""How each library shares an epoch out among ranks and finds its place again: the real loaders.

All ranks' loaders are made in one process, which none of them minds: they are told who they are.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from spotguard.runtime.data.loader import ElasticLoader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SAMPLES = 10_000
GLOBAL_BATCH = 480
"""As 4, 3 and 2 ranks divide it, and most other numbers: rivals are at their best."""
MICRO_BATCH = 8
SEED = 3


RANKS = 4
"""Before the interruption."""
STEPS = 8
"""Taken before it, of 21 in the epoch."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What was read before the interruption, and what a checkpoint would hold then."""

    read: list[list[int]]
    """The samples of each step, of all ranks."""
    own: list[Any]
    """What each rank's loader saved of itself; None if it saves nothing."""


class Way(ABC):
    """One way to read an epoch, to save in its midst, and to go on."""

    name: ClassVar[str]
    package: ClassVar[str] = "torch"
    """What must be installed."""
    quick: ClassVar[bool] = True
    """True if it can be tried on many numbers of ranks."""
    takes_global_batch: ClassVar[bool] = False
    """True if it shares out a global batch itself; else it is told each rank's batch."""

    @abstractmethod
    def loaders(self, ranks: int, batch: int, saved: Saved | None) -> list[Any]:
        """Return what each rank iterates over, from the beginning or from what was saved."""

    def interrupt(self, batch: int) -> Saved:
        """Read the first steps of the epoch and save."""
        loaders = self.loaders(RANKS, batch, None)
        iterators = [iter(loader) for loader in loaders]  # one that is gone has no state
        read = together([list(itertools.islice(iterator, STEPS)) for iterator in iterators])
        return Saved(read=read, own=[self.state(loader) for loader in loaders])

    def state(self, loader: Any) -> Any:
        """Return what a rank's loader saves of itself after the steps that were taken."""
        return None

    def missing(self) -> str:
        """Return why it cannot be tried; empty if it can."""
        if importlib.util.find_spec(self.package):
            return ""
        return f"{self.name}: left out, because `{self.package}` is not installed"

    @property
    def title(self) -> str:
        """Its name and the version of what it is."""
        name = {"streaming": "mosaicml-streaming"}.get(self.package, self.package)
        return f"{self.name} ({name} {importlib.metadata.version(name)})"


class Spotguard(Way):
    """`run.loader(...)`: the step number says everything."""

    name = "spotguard"
    package = "spotguard"
    takes_global_batch = True

    def loaders(self, ranks: int, batch: int, saved: Saved | None) -> list[Any]:
        """Return the steps that are left, of each rank."""
        first = STEPS if saved else 0
        return [self._steps(rank, ranks, batch, first) for rank in range(ranks)]

    @staticmethod
    def _steps(rank: int, ranks: int, batch: int, first: int) -> Iterator[list[int]]:
        loader = ElasticLoader(
            range(SAMPLES), global_batch_size=batch, micro_batch_size=MICRO_BATCH, shuffle=True,
            drop_last=False, seed=SEED, reseed=True, collate_fn=list, num_workers=0, options={},
            rank=rank, world_size=ranks,
        )  # fmt: skip
        read = loader.read(first, loader.steps_per_epoch)
        for _, shares in itertools.groupby(read, lambda pair: pair[0].step):
            # A rank without work joins the collectives with some batch, of weight 0.
            yield [sample for share, samples in shares if share.weight for sample in samples]


class Torchrun(Way):
    """`DistributedSampler`, and a script that begins the interrupted epoch anew."""

    name = "torchrun, epoch begun anew"

    def loaders(self, ranks: int, batch: int, saved: Saved | None) -> list[Any]:
        """Return the whole epoch: a plain `DataLoader` has no state."""
        return [
            DataLoader(
                range(SAMPLES),  # type: ignore[arg-type]
                batch_size=batch,
                sampler=DistributedSampler(range(SAMPLES), ranks, rank, seed=SEED),  # type: ignore[arg-type]
                collate_fn=list,
            )
            for rank in range(ranks)
        ]


class TorchrunSkips(Torchrun):
    """The same, and a script that skips as many batches as were trained on."""

    name = "torchrun, batches skipped by hand"

    def loaders(self, ranks: int, batch: int, saved: Saved | None) -> list[Any]:
        """Return the rest of the epoch."""
        steps = STEPS if saved else 0
        return [itertools.islice(x, steps, None) for x in super().loaders(ranks, batch, None)]


class Stateful(Way):
    """torchdata's loader and sampler, whose state the script saves on each rank."""

    name = "StatefulDataLoader"
    package = "torchdata"

    def loaders(self, ranks: int, batch: int, saved: Saved | None) -> list[Any]:
        """Return loaders with the state of a rank that was there: of the last, if there is none."""
        found = [stateful_loader(rank, ranks, batch) for rank in range(ranks)]
        for rank, loader in enumerate(found if saved else []):
            loader.load_state_dict(saved.own[min(rank, RANKS - 1)])  # type: ignore[union-attr]
        return found

    def state(self, loader: Any) -> Any:
        """Return the loader's own word."""
        return loader.state_dict()


class Accelerate(Way):
    """`prepare`, and `skip_first_batches` with the number of steps that were taken."""

    name = "Accelerate `skip_first_batches`"
    package = "accelerate"
    split: ClassVar[bool] = False

    def loaders(self, ranks: int, batch: int, saved: Saved | None) -> list[Any]:
        """Return prepared loaders, with the sampler that Accelerate can seed."""
        from accelerate import PartialState
        from accelerate.data_loader import prepare_data_loader, skip_first_batches

        PartialState(cpu=True)
        found = [
            prepare_data_loader(
                DataLoader(range(SAMPLES), batch_size=batch, shuffle=True, collate_fn=list),  # type: ignore[arg-type]
                num_processes=ranks,
                process_index=rank,
                split_batches=self.split,
                use_seedable_sampler=True,
                data_seed=SEED,
            )
            for rank in range(ranks)
        ]
        return [skip_first_batches(x, STEPS) for x in found] if saved else found


class AccelerateSplits(Accelerate):
    """The same with `split_batches=True`: a batch is that of all ranks."""

    name = "Accelerate with `split_batches`"
    takes_global_batch = True
    split = True


class Streaming(Way):
    """MosaicML's `StreamingDataset`: its own arithmetic for a world, from its own saved state."""

    name = "Streaming, ranks of one node"
    package = "streaming"
    canonical: ClassVar[int | None] = None
    """`num_canonical_nodes`; None: its default, as many as there were nodes at first."""

    def loaders(self, ranks: int, batch: int, saved: Saved | None) -> list[Any]:
        """Return the batches that it works out for each rank, without its padding."""
        from streaming.base.batching import generate_work
        from streaming.base.world import World

        nodes = self._nodes(RANKS if saved else ranks)
        dataset = _mds_dataset()
        dataset.batch_size = batch
        dataset.num_canonical_nodes = self.canonical or nodes
        dataset.initial_physical_nodes = nodes
        world = World(self._nodes(ranks), ranks // self._nodes(ranks), 1, 0)
        # What its own loader saves (`StreamingDataLoader.state_dict`), as long as steps are full.
        read = sum(map(len, saved.read)) if saved else 0
        work = generate_work("random", dataset, world, 0, read)
        per_rank = work.reshape(ranks, -1, batch).tolist()
        return [[[i for i in step if i >= 0] for step in steps] for steps in per_rank]

    @staticmethod
    def _nodes(ranks: int) -> int:
        return 1


class StreamingNodes(Streaming):
    """The same with one rank on each node, as with spot machines of one GPU."""

    name = "Streaming, nodes of one rank"

    @staticmethod
    def _nodes(ranks: int) -> int:
        return ranks


class StreamingCanonical(StreamingNodes):
    """The same, told in advance of a number that 4, 3 and 2 divide."""

    name = "Streaming, the same, `num_canonical_nodes=12`"
    canonical = 12


def stateful_loader(rank: int, ranks: int, batch: int) -> Any:
    """Return torchdata's loader with its own sampler for several ranks."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(range(SAMPLES), ranks, rank, seed=SEED)
    return StatefulDataLoader(range(SAMPLES), batch_size=batch, sampler=sampler)


def new_folder() -> str:
    """Return a new folder that is removed at the end."""
    return tempfile.mkdtemp(dir=_all_folders().name)


@cache
def _all_folders() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="elastic-rivals-")


def together(steps_of_ranks: Iterable[Iterable[Iterable[int]]]) -> list[list[int]]:
    """Return the samples of each step, of all ranks."""
    steps = itertools.zip_longest(*steps_of_ranks, fillvalue=())
    return [[int(sample) for batch in step for sample in batch] for step in steps]


@cache
def _mds_dataset() -> Any:
    """Return Streaming's dataset of the samples."""
    from streaming import MDSWriter, StreamingDataset

    folder = new_folder()
    with MDSWriter(out=folder, columns={"x": "int"}, size_limit="16kb") as writer:
        for sample in range(SAMPLES):
            writer.write({"x": sample})
    default = 1 << 18  # what it would choose for its blocks
    return StreamingDataset(
        local=folder, shuffle=True, shuffle_seed=SEED, batch_size=1, shuffle_block_size=default
    )
