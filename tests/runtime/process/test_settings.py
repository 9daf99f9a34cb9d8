from __future__ import annotations

import re
import stat
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.errors import UsageError
from spotguard.events import env, keys
from spotguard.runtime.process.settings import SaveEvery, Settings, fresh_run_id

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without a launcher."""
    torchs = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in (*env.JOB_VARIABLES, *torchs):
        monkeypatch.delenv(name, raising=False)


def read(**over: Any) -> Settings:
    """Return the settings for `init`'s arguments."""
    given: dict[str, Any] = dict.fromkeys(
        ("run_id", "store", "seed", "save_every", "keep_last", "peer_timeout")
    )
    return Settings.from_environment(**(given | over))


def test_plain_python_needs_nothing() -> None:
    """Without launcher and arguments: one rank, a folder here, automatic saves, seed 0."""
    settings = read()

    assert (settings.rank, settings.world_size, settings.launched) == (0, 1, False)
    assert settings.store_url.endswith("spotguard-runs")
    assert (settings.seed, settings.keep_last, settings.metadata) == (0, 3, "none")
    assert settings.save_every == SaveEvery()


def test_the_default_store_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else reads what is trained; a folder that exists, or was named, is left as it is."""
    monkeypatch.chdir(tmp_path)
    store = tmp_path / "spotguard-runs"
    read(store=str(tmp_path / "named")).make_default_store()
    assert not list(tmp_path.iterdir())

    read().make_default_store()
    assert stat.S_IMODE(store.stat().st_mode) == 0o700
    store.chmod(0o755)
    read().make_default_store()
    assert stat.S_IMODE(store.stat().st_mode) == 0o755


def test_the_command_line_wins_over_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script has built in can be changed without an edit; also to zero."""
    monkeypatch.setenv(env.STORE, "/elsewhere")
    monkeypatch.setenv(env.SAVE_EVERY, "5 steps")
    monkeypatch.setenv(env.SEED, "0")
    monkeypatch.setenv(env.RUN_ID, "theirs")
    settings = read(store="/mine", save_every="1h", seed=7, run_id="mine", keep_last=5)

    assert (settings.store_url, settings.seed, settings.run_id) == ("/elsewhere", 0, "theirs")
    assert settings.save_every == SaveEvery(steps=5)
    assert settings.keep_last == 5


def test_peers_can_be_left_alone() -> None:
    """Ten seconds by default; another duration, or not at all."""
    assert read().peer_timeout_s == 10.0
    assert read(peer_timeout="1m").peer_timeout_s == 60.0
    assert read(peer_timeout="off").peer_timeout_s is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (env.ATTEMPT, "two", "SPOTGUARD_ATTEMPT: given 'two', but must be a whole number"),
        (env.GRACE_S, "long", "SPOTGUARD_GRACE_S: given 'long', but must be a number"),
        (env.SEED, "1.5", "SPOTGUARD_SEED: given '1.5'"),
        (env.RUN_ID, "My Run", "run_id: given 'My Run'; allowed are lower-case"),
        (env.SAVE_EVERY, "now", "save_every: given 'now'"),
        (
            env.PEER_TIMEOUT,
            "never",
            "peer_timeout: given 'never'; allowed: a duration (10s), or off",
        ),
        (env.PEER_TIMEOUT, "0s", "peer_timeout: given '0s'"),
        (env.HOLD, "3", "SPOTGUARD_HOLD: given '3'"),
        (env.HOLD, "a:b", "SPOTGUARD_HOLD: given 'a:b'"),
        (env.CLAIM, "{", "SPOTGUARD_CLAIM: "),
        ("WORLD_SIZE", "many", "WORLD_SIZE: given 'many', but must be a whole number"),
        ("WORLD_SIZE", "0", "WORLD_SIZE: given 0, but there is 1 rank at least"),
        ("WORLD_SIZE", "2", "RANK: not set, but WORLD_SIZE is 2"),
        ("RANK", "1", "RANK: given 1, but must be below WORLD_SIZE, 1"),
        ("RANK", "-1", "RANK: given -1"),
        ("LOCAL_RANK", "x", "LOCAL_RANK: given 'x'"),
    ],
)
def test_nonsense_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    """A wrong variable is named, with what was given."""
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=re.escape(message)):
        read()


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_several_ranks_must_know_each_other(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Without its number every process would take itself for the first."""
    whole = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in whole.items():
        monkeypatch.setenv(name, value)
    assert (read().rank, read().world_size) == (1, 2)
    monkeypatch.delenv(missing)
    with pytest.raises(UsageError, match=f"{missing}: not set, but WORLD_SIZE is 2"):
        read()


def test_holds_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`STEP:SECONDS,...`."""
    monkeypatch.setenv(env.HOLD, "3:1.5,10:2")

    assert read().holds == {3: 1.5, 10: 2.0}


@pytest.mark.parametrize("script", ["Train GPT!.py", "", "...", "x" * 200 + ".py", "-c"])
def test_a_fresh_run_id_is_valid(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Named after the script, whatever it is called, and never twice the same."""
    monkeypatch.setattr("sys.argv", [script])
    made = {fresh_run_id() for _ in range(3)}

    assert len(made) == 3
    assert all(keys.RUN_ID_PATTERN.fullmatch(run_id) for run_id in made)
