"""`checkpoints`: real stores and journals, every command, what it prints, returns and leaves."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from spotguard.checkpoint.shard import shard_file, write_shard
from spotguard.cli.terminal import progress
from spotguard.cli.terminal.progress import bytes_progress
from spotguard.events import keys
from spotguard.testing import FakeClock
from tests.checkpoint.crashes.savings import blocks, claim, flip, save
from tests.control.checkpoints.saved_models import TiedNet, save_objects
from tests.control.run_folders import make_run

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.storage.base import ObjectStore
    from tests.cli.conftest import Cli

RUN = "a-run"


@pytest.fixture
def store(home: Path) -> ObjectStore:
    """Return the store of a settled run: 10-1 20-1, then 30-2 40-2; 30-1 is a zombie's."""
    store = make_run(home, RUN, settled=True)
    claim(store, 1)
    save(store, 10)
    save(store, 20)
    claim(store, 2, keys.checkpoint(20, 1))
    save(store, 30, 1)
    save(store, 30, 2)
    save(store, 40, 2)
    return store


def table(text: str) -> dict[str, str]:
    """Return the lines of a table by their first word."""
    return {line.split()[0]: " ".join(line.split()) for line in text.splitlines() if line.strip()}


def test_ls_shows_what_counts(cli: Cli, store: ObjectStore) -> None:
    """One row each, newest first; a zombie's save is marked and explained."""
    write_shard(store, keys.checkpoint(50, 2), shard_file(0, 2), blocks(50))
    cli("checkpoints", "pin", "--step", "20")
    said = cli("checkpoints", "ls")
    assert said.code == 0
    rows = table(said.out)
    assert list(rows)[1:7] == ["50-2", "40-2", "30-2", "30-1", "20-1", "10-1"]
    assert rows["50-2"].endswith("uncommitted")
    assert rows["40-2"].endswith("kB 2 next whole")
    assert rows["30-1"].endswith("2 no whole")
    assert rows["20-1"].endswith("2 yes whole, pinned")
    assert "never restored" in said.out
    assert max(map(len, said.out.splitlines())) <= 80


def test_ls_of_many_shows_the_newest_and_says_so(
    cli: Cli, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of months has thousands, each of which costs some requests; --all asks for all."""
    monkeypatch.setattr("spotguard.cli.checkpoints._NEWEST", 2)
    body = json.loads(cli("checkpoints", "ls", RUN, "--json").out)
    every = json.loads(cli("checkpoints", "ls", RUN, "--json", "--all").out)
    assert (len(body["checkpoints"]), body["more"]) == (2, True)
    assert body["checkpoints"] == every["checkpoints"][:2]
    assert (len(every["checkpoints"]), every["more"]) == (5, False)
    said = cli("checkpoints", "ls", RUN)
    assert "--all" in said.out + said.err


def test_ls_json_has_all_that_the_table_has(cli: Cli, store: ObjectStore) -> None:
    """One object for each checkpoint, newest first."""
    body = json.loads(cli("checkpoints", "ls", RUN, "--json").out)
    assert body["more"] is False
    assert (body["schema"], body["run_id"], len(body["checkpoints"])) == (1, RUN, 5)
    assert body["checkpoints"][0]["is_next"] is True
    assert body["checkpoints"][0]["condition"] == "whole"


def test_ls_says_what_is_wrong(cli: Cli, store: ObjectStore) -> None:
    """The damaged file stands below the table; unknown claims are not a yes or a no."""
    store.delete(keys.checkpoint(40, 2) + shard_file(1, 2))
    said = cli("checkpoints", "ls")
    assert table(said.out)["40-2"].endswith("damaged")
    assert "rank-00001-of-00002.safetensors is missing" in said.out.replace("\n", " ")
    flip(store, keys.claim(2), 8)
    said = cli("checkpoints", "ls")
    assert table(said.out)["10-1"].endswith("? whole")
    assert "claim is damaged" in said.out


def test_a_run_of_another_machine_is_named_by_its_place(
    cli: Cli, store: ObjectStore, home: Path
) -> None:
    """Without a journal, by path or URL."""
    (home / "runs").rename(home / "elsewhere")
    for place in (f"{home}/store/{RUN}", f"file://{home}/store/{RUN}"):
        assert "40-2" in cli("checkpoints", "ls", place).out
    said = cli("checkpoints", "ls", f"{home}/store/nobody")
    assert (said.code, said.out) == (2, "")
    assert "STORE" in cli("checkpoints", "ls", "--help").out


def test_unknown_runs_and_steps_name_the_nearest(cli: Cli, store: ObjectStore) -> None:
    """A typo costs one more try, not a search."""
    said = cli("checkpoints", "ls", "a-rnu")
    assert said.code == 2
    assert RUN in said.err
    said = cli("checkpoints", "show", "--step", "41")
    assert said.code == 2
    assert "no committed checkpoint 41" in said.err
    assert "40-2" in said.err


def test_a_run_without_checkpoints_says_so(cli: Cli, home: Path) -> None:
    """An empty list is an answer; a checkpoint that is not there is an error."""
    make_run(home, RUN)
    assert cli("checkpoints", "ls").out == f"{RUN} has no checkpoint yet\n"
    assert cli("checkpoints", "verify", "--all").out.startswith("nothing to verify")
    assert cli("checkpoints", "export").code == 2
    assert cli("checkpoints", "prune").out == "nothing to delete\n"


def test_show_tells_everything_and_hides_control_characters(cli: Cli, store: ObjectStore) -> None:
    """Tensors, shards, counters, versions, parents; a tensor's name cannot move the cursor."""
    model = torch.nn.Module()
    model.register_buffer("evil\x1b[2J", torch.zeros(2, 3))
    save_objects(store, 60, 2, world_size=2, cut=lambda *_: (0, [1, 1]), model=model)
    said = cli("checkpoints", "show")
    assert said.code == 0
    for word in ("60-2 of a-run", "train_s 1.5", "spotguard 0", "model", "2×3", "0[0,0] 1[1,0]"):  # noqa: RUF001
        assert word in " ".join(said.out.split())
    assert "\x1b" not in said.out
    body = json.loads(cli("checkpoints", "show", "--json").out)
    assert body["objects"] == [{"name": "model", "is_module": True, "tensors": 1}]
    assert [part["offsets"] for part in body["tensors"][0]["parts"]] == [[0, 0], [1, 0]]


def test_show_of_a_large_one_is_short_and_says_so(
    cli: Cli, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model has thousands of tensors; JSON has them all, and so has --all."""
    monkeypatch.setattr("spotguard.cli.checkpoints._MOST_ROWS", 3)
    model = torch.nn.Module()
    for number in range(9):
        model.register_buffer(f"t{number}", torch.zeros(2))
    save_objects(store, 60, 2, world_size=2, model=model)
    said = cli("checkpoints", "show").out
    assert said.count("F32") == 3
    assert "(6 more tensors are not shown; --all shows them)" in said
    assert "more shards" not in said
    whole = cli("checkpoints", "show", "--all").out
    assert (whole.count("F32"), "not shown" in whole) == (9, False)
    assert len(json.loads(cli("checkpoints", "show", "--json").out)["tensors"]) == 9


def test_show_cuts_a_counter_that_is_the_state_of_a_generator(
    cli: Cli, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads it, and it fills the screen; JSON has it whole."""
    monkeypatch.setattr("spotguard.cli.views.checkpoints._LONGEST_COUNTER", 2)
    assert "train_s 1. …" in " ".join(cli("checkpoints", "show").out.split())
    assert '"train_s": 1.5' in cli("checkpoints", "show", "--json").out


def test_verify_returns_0_for_whole_and_10_for_damaged(cli: Cli, store: ObjectStore) -> None:
    """The file is named, in words and as JSON; other checkpoints stay whole."""
    said = cli("checkpoints", "verify", "--all")
    assert said.code == 0
    assert said.out.count("whole") == 5
    flip(store, keys.checkpoint(40, 2) + shard_file(1, 2), -1)
    said = cli("checkpoints", "verify")
    assert said.code == 10
    assert table(said.out)["40-2"].endswith("damaged rank-00001-of-00002.safetensors")
    assert "hash of bytes 4096 to" in said.out
    said = cli("checkpoints", "verify", "--all", "--json")
    assert said.code == 10
    body = json.loads(said.out)
    assert body["ok"] is False
    assert [item["condition"] for item in body["checkpoints"]] == ["damaged"] + ["whole"] * 4
    assert body["checkpoints"][0]["problems"][0]["file"] == shard_file(1, 2)
    assert cli("checkpoints", "verify", "--step", "30").code == 0
    assert cli("checkpoints", "verify", "--all", "--step", "30").code == 2


def test_prune_shows_asks_deletes_and_spares_pins(
    cli: Cli, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing goes without a yes, and never what is pinned."""
    assert "is pinned" in cli("checkpoints", "pin", "--step", "10", "--why", "the paper").out
    assert "was pinned already" in cli("checkpoints", "pin", "--step", "10").out
    dry = cli("checkpoints", "prune", "--keep-last", "2", "--dry-run")
    assert dry.out.splitlines()[:2] == ["delete 20-1", "delete 30-1"]
    assert "nothing was" in dry.out
    refused = cli("checkpoints", "prune", "--keep-last", "2")
    assert (refused.code, "--yes" in refused.err) == (2, True)
    assert len(json.loads(cli("checkpoints", "ls", "--json").out)["checkpoints"]) == 5
    done = cli("checkpoints", "prune", "--keep-last", "2", "--yes")
    assert "2 deleted" in done.out
    left = table(cli("checkpoints", "ls").out)
    assert [name for name in left if "-" in name] == ["40-2", "30-2", "10-1"]
    assert "is pinned no longer" in cli("checkpoints", "unpin", "--step", "10").out
    assert "was not pinned" in cli("checkpoints", "unpin", "--step", "10").out
    assert cli("checkpoints", "prune", "--keep-last", "1").code == 2


def copied(store: ObjectStore) -> str:
    """Copy another run's whole checkpoint into the store, as the newest of its history."""
    prefix = save_objects(store, 60, 2, run_id="other-run", model=TiedNet())
    return f"{prefix} belongs to run other-run, not to {RUN}"


def test_a_checkpoint_of_another_run_is_marked_and_refused(
    cli: Cli, store: ObjectStore, tmp_path: Path
) -> None:
    """What a resume passes over is neither proven nor given out; both runs are named."""
    problem = copied(store)
    said = cli("checkpoints", "ls")
    assert table(said.out)["60-2"].endswith("another run's")
    assert problem in " ".join(said.out.split())
    assert table(said.out)["40-2"].endswith("next whole")
    for command in ("verify", "export"):
        said = cli("checkpoints", command)
        assert (said.code, said.out) == (10, "")
        assert problem in " ".join(said.err.split())
        assert "folder of its own run" in " ".join(said.err.split())
    assert not list((tmp_path / "work").glob("*.safetensors"))
    said = cli("checkpoints", "verify", "--all")
    assert said.code == 10
    assert table(said.out)["60-2"].endswith("another run's manifest.json")
    assert said.out.count("whole") == 5
    said = cli("checkpoints", "show", "--step", "60")
    assert (said.code, problem in " ".join(said.out.split())) == (0, True)


def test_a_checkpoint_of_another_run_is_not_one_of_the_last(cli: Cli, store: ObjectStore) -> None:
    """Retention counts two of the run's own before it deletes any."""
    copied(store)
    assert cli("checkpoints", "prune", "--keep-last", "2", "--yes").code == 0
    left = [
        row["step"] for row in json.loads(cli("checkpoints", "ls", "--json").out)["checkpoints"]
    ]
    assert left == [60, 40, 30]


def test_a_living_run_is_not_pruned(cli: Cli, home: Path) -> None:
    """Its job may be saving; what would go may be looked at all the same."""
    store = make_run(home, RUN)
    claim(store, 1)
    for step in (10, 20, 30, 40):
        save(store, step)
    said = cli("checkpoints", "prune", "--yes")
    assert said.code == 2
    assert f"spotguard stop {RUN}" in said.err
    assert "delete 10-1" in cli("checkpoints", "prune", "--dry-run").out


def test_export_writes_a_file_that_loads(cli: Cli, store: ObjectStore, tmp_path: Path) -> None:
    """By default the newest model's own keys, in this folder; an existing file is kept."""
    model = TiedNet()
    save_objects(store, 60, 2, model=model)
    said = cli("checkpoints", "export")
    assert said.code == 0
    target = tmp_path / "work" / f"{RUN}-step-60.safetensors"
    assert f"wrote {target.name}: 8 tensors of checkpoint 60-2 of {RUN}" in said.out
    TiedNet().load_state_dict(load_file(target))
    assert cli("checkpoints", "export").code == 2
    assert cli("checkpoints", "export", "--force", "--dtype", "bf16").code == 0
    assert load_file(target)["head.weight"].dtype is torch.bfloat16
    assert cli("checkpoints", "export", "--everything", "-o", "all.safetensors").code == 0
    assert "model.head.weight" in load_file(tmp_path / "work" / "all.safetensors")
    said = cli("checkpoints", "export", "--dtype", "int8", "-o", "x")
    assert (said.code, "bf16, fp16, fp32" in said.err) == (2, True)
    assert cli("checkpoints", "export", "--everything", "--object", "model").code == 2


def test_export_of_damaged_shards_returns_10_and_no_file(
    cli: Cli, store: ObjectStore, tmp_path: Path
) -> None:
    """The shard is named."""
    prefix = save_objects(store, 60, 2, model=TiedNet())
    flip(store, prefix + shard_file(0, 1), -1)
    said = cli("checkpoints", "export")
    assert said.code == 10
    assert "rank-00000-of-00001.safetensors is damaged" in said.err
    assert list((tmp_path / "work").iterdir()) == []


def test_what_an_export_leaves_out_or_overflows_is_said(cli: Cli, store: ObjectStore) -> None:
    """On stderr, with names."""

    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("large", torch.tensor([1e30]))

        def get_extra_state(self) -> Any:
            return {"calls": 3}

    save_objects(store, 60, 2, model=Odd())
    said = cli("checkpoints", "export", "--dtype", "fp16")
    assert said.code == 0
    assert "left out, for these are no tensors: _extra_state" in said.err
    assert "infinite now: values in large" in said.err


def test_checkpoints_alone_shows_its_commands(cli: Cli) -> None:
    """As `spotguard` alone does."""
    said = cli("checkpoints")
    assert said.code == 0
    assert "export" in said.out


# ---------------------------------------------------------------- progress


def test_progress_is_silent_for_a_second_then_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a log: what is quick says nothing, what is long one line every ten seconds."""
    clock = FakeClock()
    with bytes_progress("verifying", clock=clock) as tell:
        for done in range(0, 250):
            clock.sleep(0.1)
            tell(done * 10_000_000, 2_500_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0] == "verifying: 990.0 MB of 2.5 GB"


def test_progress_on_a_terminal_is_a_bar_that_is_wiped() -> None:
    """Drawn only after a second; nothing stays behind."""
    clock, drawn = FakeClock(), io.StringIO()
    terminal = Console(file=drawn, force_terminal=True, width=100)
    with bytes_progress("exporting", clock=clock, terminal=terminal) as tell:
        tell(1, 100)
        assert drawn.getvalue() == ""
        clock.sleep(progress.QUIET_S)
        tell(50, 100)
    assert "exporting" in drawn.getvalue()
    assert drawn.getvalue().rstrip().endswith("\x1b[2K")


def test_looking_at_checkpoints_imports_no_torch() -> None:
    """Listing and verifying stay quick on a machine where torch takes seconds to load."""
    code = (
        "import sys; import spotguard.cli.checkpoints, spotguard.cli.views.checkpoints, "
        "spotguard.control.checkpoints.detail, spotguard.control.checkpoints.export; "
        "sys.exit(' '.join({'torch', 'numpy', 'sky'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stderr) == (0, "")
