from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from spotguard.checkpoint.lineage import CheckpointRef
from spotguard.checkpoint.manifest import commit
from spotguard.checkpoint.shard import shard_file, write_shard
from spotguard.checkpoint.tensors import PIECE_BYTES
from spotguard.control.checkpoints import new_file as new_files
from spotguard.control.checkpoints.export import DTYPES, Exported, export
from spotguard.control.checkpoints.find import OpenedRun
from spotguard.control.checkpoints.new_file import new_file
from spotguard.errors import DamagedCheckpoint, EnvironmentFailure, UsageError
from spotguard.events import keys
from spotguard.storage import FileStore
from spotguard.testing import FaultyStore, MemoryStore
from spotguard.testing.stores import SimulatedCrash
from tests.checkpoint.crashes.savings import cut_into_pieces, flip, make_manifest
from tests.control.checkpoints.saved_models import TiedNet, block, raw, save_objects

if TYPE_CHECKING:
    from spotguard.storage.base import ObjectStore
    from tests.control.checkpoints.saved_models import Cut


def run_export(store: ObjectStore, prefix: str, target: Path, **options: Any) -> Exported:
    """Export the checkpoint at a prefix."""
    ref = CheckpointRef.of(prefix)
    assert ref
    run = OpenedRun(run_id="a-run", store=store, at_rest=True)
    return export(run, ref, target, **options)


def files_in(folder: Path) -> list[str]:
    """Return the names of all files, hidden ones too."""
    return sorted(path.name for path in folder.iterdir())


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return whether two state dicts agree in names, forms and every bit."""
    return one.keys() == other.keys() and all(
        (one[key].dtype, one[key].shape, raw(one[key]))
        == (other[key].dtype, other[key].shape, raw(other[key]))
        for key in one
    )


class Moments:
    """What an optimizer's state looks like, without the seconds that importing one takes."""

    def __init__(self, exp_avg: torch.Tensor) -> None:
        self.exp_avg = exp_avg

    def state_dict(self) -> dict[str, Any]:
        """Return one parameter's state."""
        return {"state": {0: {"exp_avg": self.exp_avg}}, "param_groups": [{"lr": 0.1}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is loaded here."""


def in_thirds(name: str, tensor: torch.Tensor) -> Cut | None:
    """Cut large tensors for three ranks: some by rows, some by columns, all unevenly."""
    if tensor.ndim == 0:
        return None
    axis = tensor.ndim - 1 if "weight" in name or "table" in name else 0
    size = tensor.shape[axis]
    first = size // 2
    second = (size - first) // 2 + 1
    return axis, [first, second, size - first - second]


# ---------------------------------------------------------------- what is in the file


def test_load_file_and_load_state_dict_work_on_an_export(tmp_path: Path) -> None:
    """Tied keys, buffers, several dtypes: the model's own state dict, bit by bit."""
    store, model = MemoryStore(), TiedNet()
    prefix = save_objects(store, model=model, optimizer=Moments(torch.randn(9, 6)))
    done = run_export(store, prefix, tmp_path / "m.safetensors")
    loaded = load_file(tmp_path / "m.safetensors")
    assert same_bits(loaded, dict(model.state_dict()))
    fresh = TiedNet()
    torch.nn.init.zeros_(fresh.embedding.weight)
    fresh.load_state_dict(loaded)
    assert torch.equal(fresh.head.weight, model.head.weight)
    assert done.tensors == len(model.state_dict()) == 8
    assert done.size_bytes == (tmp_path / "m.safetensors").stat().st_size
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata() == {
            "format": "pt",
            "run_id": "a-run",
            "checkpoint": prefix,
            "step": "10",
        }


def test_the_shards_of_three_ranks_become_one_file(tmp_path: Path) -> None:
    """Cut by rows, by columns, unevenly, also with a rank that has nothing: the same bits."""
    store, model = MemoryStore(), TiedNet()
    prefix = save_objects(store, world_size=3, cut=in_thirds, model=model)
    run_export(store, prefix, tmp_path / "m.safetensors")
    assert same_bits(load_file(tmp_path / "m.safetensors"), dict(model.state_dict()))


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_a_part_cut_along_any_dimension_finds_its_place(axis: int, tmp_path: Path) -> None:
    """Four dimensions, five ranks, of which one has no row."""
    store, model = MemoryStore(), torch.nn.Module()
    model.register_buffer("x", torch.arange(6 * 5 * 4 * 3, dtype=torch.int32).view(6, 5, 4, 3))
    size = model.x.shape[axis]  # type: ignore[index]
    rows = [1, 0, size - 3, 1, 1]
    prefix = save_objects(store, world_size=5, cut=lambda *_: (axis, rows), model=model)  # type: ignore[arg-type]
    run_export(store, prefix, tmp_path / "m.safetensors")
    assert same_bits(load_file(tmp_path / "m.safetensors"), dict(model.state_dict()))


def test_a_part_larger_than_a_piece_is_merged_piecewise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces may end in the middle of a row."""
    cut_into_pieces(monkeypatch)
    store, model = MemoryStore(), torch.nn.Linear(1500, 30)
    prefix = save_objects(store, world_size=3, cut=in_thirds, model=model)
    run_export(store, prefix, tmp_path / "m.safetensors")
    assert same_bits(load_file(tmp_path / "m.safetensors"), dict(model.state_dict()))


def test_copies_on_several_ranks_are_written_once(tmp_path: Path) -> None:
    """Replicated parts (hybrid sharding) are no contradiction; the first copy counts."""
    store, model = MemoryStore(), torch.nn.Linear(4, 6)
    weight = model.weight.detach()
    prefix = keys.checkpoint(10, 1)
    save_objects(MemoryStore(), model=model)
    parts = [(weight[:3], 0), (weight[3:], 3), (weight[:3], 0), (weight[3:], 3)]
    shards = tuple(
        write_shard(
            store,
            prefix,
            shard_file(rank, 4),
            [
                block("model.weight", part, global_shape=(6, 4), offsets=(row, 0)),
                block("model.bias", model.bias.detach()),
            ],
        )
        for rank, (part, row) in enumerate(parts)
    )
    tree = {"model": [[key, {"$": "tensor", "name": f"model.{key}"}] for key in ("weight", "bias")]}
    commit(store, make_manifest(10, shards=shards, state=tree))
    run_export(store, prefix, tmp_path / "m.safetensors")
    assert same_bits(load_file(tmp_path / "m.safetensors"), dict(model.state_dict()))


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_weights_can_be_converted_and_only_floats_are(name: str, tmp_path: Path) -> None:
    """The values are torch's own conversion; integer buffers stay."""
    store, model = MemoryStore(), TiedNet()
    prefix = save_objects(store, world_size=3, cut=in_thirds, model=model)
    done = run_export(store, prefix, tmp_path / "m.safetensors", dtype=name)
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]
    expected = {
        key: value.to(wanted) if value.is_floating_point() else value
        for key, value in model.state_dict().items()
    }
    assert same_bits(load_file(tmp_path / "m.safetensors"), expected)
    assert done.overflowed == ()


def test_values_that_do_not_fit_the_smaller_dtype_are_told(tmp_path: Path) -> None:
    """An infinite weight never comes as a surprise; what was infinite before is not counted."""
    store, model = MemoryStore(), torch.nn.Module()
    model.register_buffer("large", torch.tensor([1.0, 1e9]))
    model.register_buffer("endless", torch.tensor([float("inf"), float("nan")]))
    prefix = save_objects(store, model=model)
    done = run_export(store, prefix, tmp_path / "m.safetensors", dtype="fp16")
    assert done.overflowed == ("large",)


def test_everything_has_all_tensors_and_converts_only_weights(tmp_path: Path) -> None:
    """The optimizer's tensors keep their bits: rounded moments are of no use to anyone."""
    store, model = MemoryStore(), TiedNet()
    moment = torch.randn(9, 6)
    prefix = save_objects(store, model=model, optimizer=Moments(moment))
    target = tmp_path / "all.safetensors"
    run_export(store, prefix, target, weights_only=False, dtype="bf16")
    loaded = load_file(target)
    assert loaded["model.head.weight"].dtype is torch.bfloat16
    assert torch.equal(loaded["model.head.weight"], loaded["model.embedding.weight"])
    assert torch.equal(loaded["optimizer.state.0.exp_avg"], moment)
    assert len(loaded) == 8 + 1


def test_the_module_is_found_or_the_user_is_told_which_there_are(tmp_path: Path) -> None:
    """`model` by default, the only one under any name, else a question with the names."""
    store, net = MemoryStore(), torch.nn.Linear(2, 2)
    target = tmp_path / "m.safetensors"
    only = save_objects(store, 10, net=net, counts={"n": 1})
    run_export(store, only, target)
    two = save_objects(store, 20, teacher=net, student=torch.nn.Linear(2, 3))
    with pytest.raises(UsageError, match="2 modules: teacher, student"):
        run_export(store, two, target, replace=True)
    run_export(store, two, target, object_name="student", replace=True)
    assert load_file(target)["weight"].shape == (3, 2)
    with pytest.raises(UsageError, match="no module 'studnet'") as caught:
        run_export(store, two, target, object_name="studnet", replace=True)
    assert "'student'" in caught.value.hint
    none = save_objects(store, 30, counts={"n": torch.zeros(1)})
    with pytest.raises(UsageError, match="no module: only counts"):
        run_export(store, none, target, replace=True)
    with pytest.raises(UsageError, match="dtype: given 'int4'; allowed: bf16, fp16, fp32"):
        run_export(store, only, target, dtype="int4", replace=True)


def test_extra_state_that_is_no_tensor_is_left_out_and_told(tmp_path: Path) -> None:
    """A safetensors file cannot hold it; silence would be a lie."""

    class Counted(torch.nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"calls": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    store = MemoryStore()
    prefix = save_objects(store, model=Counted(2, 2))
    done = run_export(store, prefix, tmp_path / "m.safetensors")
    assert done.left_out == ("_extra_state",)
    assert set(load_file(tmp_path / "m.safetensors")) == {"weight", "bias"}


def test_tensors_begin_at_multiples_of_their_elements_size(tmp_path: Path) -> None:
    """A reader may map the file and use the tensors where they are."""
    store, model = MemoryStore(), torch.nn.Module()
    model.register_buffer("a", torch.ones(3, dtype=torch.bool))
    model.register_buffer("b", torch.ones(3, dtype=torch.float64))
    model.register_buffer("c", torch.ones(3, dtype=torch.bfloat16))
    prefix = save_objects(store, model=model)
    run_export(store, prefix, tmp_path / "m.safetensors")
    raw = (tmp_path / "m.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    begins = {name: header[name]["data_offsets"][0] for name in "abc"}
    assert sorted(begins, key=lambda name: begins[name]) == ["b", "c", "a"]


# ---------------------------------------------------------------- damage


def test_a_damaged_shard_stops_the_export_and_leaves_no_file(tmp_path: Path) -> None:
    """Nobody deploys a model with a flipped bit; even in a tensor that is not exported."""
    store, model = MemoryStore(), TiedNet()
    prefix = save_objects(store, world_size=3, cut=in_thirds, model=model)
    flip(store, prefix + shard_file(2, 3), -1)
    with pytest.raises(DamagedCheckpoint, match="rank-00002-of-00003") as caught:
        run_export(store, prefix, tmp_path / "m.safetensors")
    assert "verify --all" in caught.value.hint
    assert files_in(tmp_path) == []


def test_a_checkpoint_that_retention_deletes_meanwhile_is_not_called_damaged(
    tmp_path: Path,
) -> None:
    """The user learns what happened, and how to keep it from happening again."""
    inner = MemoryStore()
    prefix = save_objects(inner, model=TiedNet())

    def pruned(_: str) -> None:
        for info in list(inner.list(prefix)):
            inner.delete(info.key)

    with pytest.raises(UsageError, match="deleted by retention") as caught:
        run_export(FaultyStore(inner).before("get_into", pruned), prefix, tmp_path / "m")
    assert "pin" in caught.value.hint
    assert files_in(tmp_path) == []


def test_parts_that_do_not_make_a_whole_are_damage(tmp_path: Path) -> None:
    """A missing rank's rows are never filled with zeros."""
    store = MemoryStore()
    part = block("model.w", torch.ones(2, 3), global_shape=(4, 3), offsets=(0, 0))
    odd = block("model.w", torch.ones(2, 3).half(), global_shape=(4, 3), offsets=(2, 0))
    tree = {"model": [["w", {"$": "tensor", "name": "model.w"}]]}
    for step, parts, problem in (
        (1, [part], "only parts of"),
        (2, [part, odd], "do not fit together"),
        (3, [], "no shard holds"),
    ):
        shards = tuple(
            write_shard(store, keys.checkpoint(step, 1), shard_file(rank, 2), [piece])
            for rank, piece in enumerate(parts)
        )
        prefix = commit(store, make_manifest(step, shards=shards, state=tree))
        with pytest.raises(DamagedCheckpoint, match=problem):
            run_export(store, prefix, tmp_path / "m.safetensors")
    assert files_in(tmp_path) == []


# ---------------------------------------------------------------- the file


@pytest.fixture(params=["nameless", "hidden"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to write a file that is not there yet: without a name, or with a hidden one."""
    if request.param == "hidden":
        monkeypatch.setattr(new_files, "_NAMELESS", None)
    return str(request.param)


def test_a_file_that_exists_is_kept_unless_it_may_be_replaced(tmp_path: Path, way: str) -> None:
    """Also a dangling link, and one that appeared while the export went on."""
    store = MemoryStore()
    prefix = save_objects(store, model=torch.nn.Linear(2, 2))
    target = tmp_path / "m.safetensors"
    target.write_text("mine")
    with pytest.raises(UsageError, match="exists already") as caught:
        run_export(store, prefix, target)
    assert "--force" in caught.value.hint
    assert target.read_text() == "mine"
    run_export(store, prefix, target, replace=True)
    assert set(load_file(target)) == {"weight", "bias"}
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(UsageError, match="exists already"):
        run_export(store, prefix, tmp_path / "link")
    late = tmp_path / "late.safetensors"

    def appear(_: str) -> None:
        late.write_text("mine")

    slow = FaultyStore(store).before("get_into", appear)
    with pytest.raises(UsageError, match="exists already"):
        run_export(slow, prefix, late)
    assert late.read_text() == "mine"
    assert files_in(tmp_path) == ["late.safetensors", "link", "m.safetensors"]


@pytest.mark.parametrize("crash", [SimulatedCrash("x"), KeyboardInterrupt()])
def test_an_export_that_dies_half_way_leaves_no_file(
    tmp_path: Path, way: str, crash: BaseException
) -> None:
    """Neither the target nor anything hidden; an old file stays as it was."""
    store = MemoryStore()
    prefix = save_objects(store, world_size=3, cut=in_thirds, model=TiedNet())
    (tmp_path / "old").write_text("old")
    for name in ("new", "old"):
        faulty = FaultyStore(store).fail("get_into", nth=2, error=crash)
        with pytest.raises(type(crash)):
            run_export(faulty, prefix, tmp_path / name, replace=True)
    assert files_in(tmp_path) == ["old"]
    assert (tmp_path / "old").read_text() == "old"


_KILLED = """
import os, pathlib, signal, sys
from spotguard.control.checkpoints.new_file import new_file, write_at
with new_file(pathlib.Path(sys.argv[1]), 100, replace=False) as descriptor:
    write_at(descriptor, memoryview(b"half"), 0)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="needs files without a name")
def test_even_a_kill_leaves_no_file(tmp_path: Path) -> None:
    """Until it is whole the file has no name, so nobody needs to tidy up."""
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path / "m")],
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert done.returncode == -signal.SIGKILL
    assert files_in(tmp_path) == []


def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder, a folder in its place, no room: one sentence each, and nothing is left."""
    with pytest.raises(UsageError, match="there is no folder"), _new(tmp_path / "no" / "m"):
        pass
    with pytest.raises(UsageError, match="is a folder"), _new(tmp_path):
        pass

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with (
        pytest.raises(EnvironmentFailure, match=r"m cannot be written: No space.*3\.2 MB"),
        _new(tmp_path / "m"),
    ):
        pass
    assert files_in(tmp_path) == []


def _new(path: Path) -> Any:
    return new_file(path, 3_200_000, replace=False)


def test_a_file_is_readable_by_whom_the_umask_allows(tmp_path: Path, way: str) -> None:
    """As any file the user makes."""
    before = os.umask(0o027)
    try:
        with _new(tmp_path / "m"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o640


def test_an_export_needs_little_memory(tmp_path: Path) -> None:
    """A model of 48 MB passes through the memory of a few pieces, proven and merged on the way."""
    store = FileStore(tmp_path / "store")
    model = torch.nn.Linear(3000, 4000, bias=False)
    halves = save_objects(store, world_size=2, cut=lambda *_: (0, [2000, 2000]), model=model)
    tracemalloc.start()
    try:
        run_export(store, halves, tmp_path / "m.safetensors")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * PIECE_BYTES
    assert (tmp_path / "m.safetensors").stat().st_size > 48_000_000
