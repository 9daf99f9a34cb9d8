from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.errors import DamagedCheckpoint
from spotguard.events import keys
from spotguard.shared.units import from_iso, to_iso
from spotguard.storage import open_store
from tests.runtime.harness.processes import TINY, alive, digest, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.runtime.harness.processes import Job, Jobs

pytestmark = pytest.mark.e2e

KILL, TERM, INT = "SIGKILL", "SIGTERM", "SIGINT"


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, str]:
    """What the final state of each kind of run is when nothing happens."""
    return {}


def expected(jobs: Jobs, known: dict[str, str], **env: Any) -> str:
    """Return the digest of an undisturbed run with this environment, run once for all tests."""
    key = repr(sorted(env.items()))
    if key not in known:
        known[key] = digest(jobs.run(**env, SPOTGUARD_RUN_ID=f"undisturbed-{len(known)}"))
    return known[key]


@pytest.mark.parametrize(
    ("hurt", "code", "reason", "saved_step"),
    [
        (f"13:begin:{KILL}", -9, None, 0),
        (f"13:batch:{KILL}", -9, None, 0),
        (f"13:changing:{KILL}", -9, None, 0),
        (f"10:begin:{KILL}", -9, None, 0),  # a periodic save is in flight
        (f"0:batch:{KILL}", -9, None, 0),
        (f"13:batch:{TERM}", 75, "terminated", 14),
        (f"13:changing:{TERM}+{TERM}+{TERM}", 75, "terminated", 14),
        (f"0:begin:{TERM}", 75, "terminated", 0),  # before the first micro-batch, or after the step
        (f"23:batch:{TERM}", None, None, 24),  # the last step: it may also just finish
        (f"13:batch:{INT}", 75, "stopped", 13),
        (f"13:changing:{INT}", 75, "stopped", 10),  # halfway changed: the last save counts
        (f"13:end:{INT}", 75, "stopped", 10),
        ("13:batch:raise", 1, "failed", 10),
        ("13:changing:raise", 1, "failed", 10),
    ],
    ids=str,
)
def test_any_end_is_resumed_as_if_it_had_not_been(
    jobs: Jobs,
    undisturbed: dict[str, str],
    hurt: str,
    code: int | None,
    reason: str | None,
    saved_step: int,
) -> None:
    """Killed, told to stop, interrupted or failed, anywhere in a step: the same final state.

    Weights, BatchNorm, schedule, the script's own generator and its counts: bit by bit.
    """
    aim = expected(jobs, undisturbed)
    job = jobs.start(HURT=hurt)
    ended = job.wait()
    assert code is None or ended == code, job.said
    if reason is not None:
        [end] = [end for end in jobs.ends() if end["reason"] == reason]
        if reason == "terminated":  # at the boundary, or a step later: the watcher has its pace
            assert end["saved_step"] == end["step"] >= saved_step
        else:
            assert end["saved_step"] == saved_step
    if ended:
        assert digest(jobs.run()) == aim
    else:
        assert digest(job.said) == aim


@pytest.mark.parametrize("write", [4, 7, 9, 11, 13])
def test_death_inside_a_save_costs_that_save_only(
    jobs: Jobs, undisturbed: dict[str, str], write: int
) -> None:
    """kill -9 at some write of shard, manifest or event: the one before is restored."""
    aim = expected(jobs, undisturbed)
    job = jobs.start(HURT=f"put:{write}:{KILL}")
    assert job.wait() == -9, job.said

    assert digest(jobs.run()) == aim


def test_many_lives_end_the_same(jobs: Jobs, undisturbed: dict[str, str]) -> None:
    """Six ends in a row, of every kind: the seventh life finishes with the very same state."""
    aim = expected(jobs, undisturbed)
    for hurt in (
        f"3:batch:{KILL}",
        f"6:batch:{INT}",
        f"8:end:{TERM}",
        "12:batch:raise",
        f"14:changing:{KILL}",
        f"20:begin:{TERM}",
    ):
        assert jobs.start(HURT=hurt).wait() != 0

    assert digest(jobs.run()) == aim
    assert jobs.claims() == set(range(1, 8))
    started = {event.attempt for event in jobs.events() if event.kind == "started"}
    assert {2, 3, 4, 6, 7} <= started, "only a killed life may take its words with it"


@pytest.mark.parametrize("hurt", [f"13:batch:{INT}", f"13:changing:{KILL}", f"13:end:{TERM}"])
def test_randomness_left_to_the_script_goes_on(
    jobs: Jobs, undisturbed: dict[str, str], hurt: str
) -> None:
    """With `reseed=False` the global generators' states are saved, also from within a step."""
    aim = expected(jobs, undisturbed, OWN_RANDOMNESS=1)
    assert aim != expected(jobs, undisturbed)
    assert jobs.start(HURT=hurt, OWN_RANDOMNESS=1).wait() != 0

    assert digest(jobs.run(OWN_RANDOMNESS=1)) == aim


def test_a_finished_run_does_nothing_again(jobs: Jobs, undisturbed: dict[str, str]) -> None:
    """Started once more, it restores the final state, trains no step, and says the same."""
    aim = expected(jobs, undisturbed)
    first = jobs.run()
    assert digest(first) == aim
    assert digest(jobs.run()) == aim

    assert [end["reason"] for end in jobs.ends()] == ["finished", "finished"]
    assert [event.data["resumed_step"] for event in jobs.events() if event.kind == "started"] == [
        0,
        24,
    ]


def test_workers_die_with_nobody(jobs: Jobs, undisturbed: dict[str, str]) -> None:
    """SIGTERM to the whole tree with DataLoader workers: saved, 75, no process left, resumed."""
    aim = expected(jobs, undisturbed)
    job = jobs.start(WORKERS=2, HURT="6:batch:hang", SPOTGUARD_GRACE_S=2)
    job.wait_for("hurt at 6")
    workers = children(job.pid)
    assert len(workers) == 2
    job.kill_tree(signal.SIGTERM)
    assert job.wait() == 75, job.said
    wait_until(lambda: not any(alive(pid) for pid in workers), lambda: f"{workers} are gone")

    assert digest(jobs.run(WORKERS=2)) == aim


@pytest.mark.parametrize("hurt", ["sample:7:", "6:batch:raise"], ids=str)
def test_a_failure_with_workers_ends_the_job(jobs: Jobs, hurt: str) -> None:
    """A broken sample in a worker, or a failing script: the process ends, it does not hang."""
    job = jobs.start(WORKERS=2, HURT=hurt)
    assert job.wait() == 1, job.said

    assert [end["reason"] for end in jobs.ends()] == ["failed"]
    assert "ValueError" in jobs.ends()[0]["message"]


def children(pid: int) -> list[int]:
    """Return the direct children of a process."""
    done = subprocess.run(
        ["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False, timeout=10
    )
    return [int(line) for line in done.stdout.split()]


def test_sigterm_again_and_again_until_it_is_over(jobs: Jobs, undisturbed: dict[str, str]) -> None:
    """One that comes while the process already leaves changes neither its word nor its code."""
    aim = expected(jobs, undisturbed)
    job = jobs.start(PACE_S=0.05)
    job.wait_for("saved step 5")
    while not job.is_over():
        job.kill(signal.SIGTERM)
        time.sleep(0.002)
    assert job.code == 75, job.said
    assert [end["reason"] for end in jobs.ends()] == ["terminated"]

    assert digest(jobs.run()) == aim


def test_sigterm_in_a_hanging_step_saves_the_last_finished_one(
    jobs: Jobs, undisturbed: dict[str, str]
) -> None:
    """The step is longer than the grace: its gradients are given up, not the run."""
    aim = expected(jobs, undisturbed)
    job = jobs.start(HURT="13:batch:hang", SPOTGUARD_GRACE_S=2)
    job.wait_for("hurt at 13")
    job.kill(signal.SIGTERM)
    assert job.wait() == 75, job.said
    [end] = jobs.ends()
    assert (end["reason"], end["saved_step"]) == ("terminated", 13)

    assert digest(jobs.run()) == aim


@pytest.mark.parametrize("before", ["notice", "stop"])
def test_a_nearer_deadline_that_comes_later_is_kept(
    jobs: Jobs, undisturbed: dict[str, str], before: str
) -> None:
    """Warned for much later, or agreed to stop in no hurry, and then SIGTERM: its grace counts."""
    aim = expected(jobs, undisturbed)
    notice, stop = jobs.folder / "notice", jobs.folder / "spotguard-runs/a-run" / keys.stop(1)
    job = jobs.start(
        HURT="13:batch:hang",
        SPOTGUARD_GRACE_S=3,
        SPOTGUARD_NOTICE_FILE=notice,
        SPOTGUARD_HEARTBEAT_S=0.1,
    )
    job.wait_for("hurt at 13")
    if before == "notice":
        appear(notice, {"deadline_at": to_iso(time.time() + 300)})
        job.wait_for("announces")
    else:
        appear(stop, {"reason": "stopped"})
        wait_until(lambda: "stop_agreed" in {e.kind for e in jobs.events()}, lambda: job.said)
    job.kill(signal.SIGTERM)
    assert job.wait() == 75, job.said
    [end] = jobs.ends()
    reason = {"notice": "preempted", "stop": "stopped"}[before]
    assert (end["reason"], end["saved_step"]) == (reason, 13)
    assert from_iso(end["deadline_at"]) < time.time() + 60
    notice.unlink(missing_ok=True)

    assert digest(jobs.run()) == aim


def appear(path: Path, content: dict[str, str]) -> None:
    """Let a whole file be there at once."""
    path.with_suffix(".new").write_text(json.dumps(content))
    path.with_suffix(".new").rename(path)


def test_sigterm_before_the_loop_ends_at_once(jobs: Jobs) -> None:
    """While the script still builds its model there is nothing to save; it leaves, and says why."""
    script = jobs.folder / "slow.py"
    script.write_text(
        "import time, spotguard.runtime as spotguard\n"
        "spotguard.init()\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    job = jobs.start(script)
    job.wait_for("ready")
    job.kill(signal.SIGTERM)

    assert job.wait() == 75
    assert [end["reason"] for end in jobs.ends()] == ["terminated"]


@pytest.mark.parametrize("every", ["5 steps", "1 step"])
def test_a_full_disk_stops_in_words_and_loses_nothing(
    jobs: Jobs, undisturbed: dict[str, str], every: str
) -> None:
    """No save fits any more: it ends with 3 and one sentence, and goes on once there is room."""
    env: dict[str, Any] = {"WIDTH": 2000, "STEPS": 40}
    aim = expected(jobs, undisturbed, **env)
    job = jobs.start(HURT="11:begin:full", EVERY=every, **env)
    assert job.wait() == 3, job.said
    assert "Traceback" not in job.said
    [end] = jobs.ends()
    assert end["reason"] == "store_failed"
    assert end["saved_step"] in (10, 11)
    assert digest(jobs.run(EVERY=every, **env)) == aim


def test_a_file_is_a_notice(jobs: Jobs, undisturbed: dict[str, str]) -> None:
    """Without any cloud: the file appears, the job saves and leaves with the reason preempted."""
    env: dict[str, Any] = {"PACE_S": 0.05}
    aim = expected(jobs, undisturbed)
    notice = jobs.folder / "notice"
    job = jobs.start(SPOTGUARD_NOTICE_FILE=notice, **env)
    job.wait_for("saved step 5")
    notice.touch()
    assert job.wait() == 75, job.said
    notice.unlink()
    [end] = jobs.ends()
    assert end["reason"] == "preempted"
    assert end["saved_step"] == end["step"]

    assert digest(jobs.run()) == aim


def test_a_damaged_save_is_passed_over(jobs: Jobs, undisturbed: dict[str, str]) -> None:
    """The newest save has a flipped bit: the one before is taken, which is said, and it counts."""
    aim = expected(jobs, undisturbed)
    assert jobs.start(HURT=f"13:batch:{INT}").wait() == 75
    store = open_store(str(jobs.folder / "spotguard-runs" / "a-run"))
    [shard] = [i.key for i in store.list("checkpoints/000000000013") if "safetensors" in i.key]
    data = bytearray(store.get(shard))
    data[-5] ^= 4
    store.put(shard, data)
    said = jobs.run()

    assert "passed over checkpoints/000000000013-000001/: " in said
    assert "is damaged" in said
    assert digest(said) == aim


def test_when_all_is_damaged_it_says_so(jobs: Jobs) -> None:
    """No silent start from nothing: one sentence, exit code 10."""
    assert jobs.start(HURT=f"13:batch:{INT}").wait() == 75
    store = open_store(str(jobs.folder / "spotguard-runs" / "a-run"))
    for item in list(store.list("checkpoints/")):
        if "safetensors" in item.key:
            store.put(item.key, store.get(item.key)[:-1])
    said = jobs.run(code=DamagedCheckpoint.exit_code)

    assert "checkpoints of this run are damaged" in said
    assert "Traceback" not in said


def test_plain_python_is_enough(jobs: Jobs, undisturbed: dict[str, str]) -> None:
    """`python tiny.py` and nothing else: no launcher, no variables; the folder has the saves."""
    aim = expected(jobs, undisturbed)
    done = subprocess.run(
        [sys.executable, str(TINY)],
        cwd=jobs.folder,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        env={
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": ":".join(filter(None, sys.path)),
        },
    )

    assert done.returncode == 0, done.stderr
    assert digest(done.stdout) == aim
    assert (jobs.folder / "spotguard-runs").stat().st_mode & 0o777 == 0o700, "it is private"
    assert "spotguard: run tiny-" in done.stderr


# ---------------------------------------------------------------------- two ranks


def codes(ranks: list[Job]) -> list[int]:
    """Wait for all ranks; return their exit codes."""
    return [job.wait() for job in ranks]


def finished(jobs: Jobs, world: int = 2, of: str = "digest", **env: Any) -> str:
    """Run an attempt to its end on so many ranks; return its digest."""
    ranks = jobs.start_ranks(world, **env)
    assert codes(ranks) == [0] * world, "\n".join(job.said for job in ranks)
    return digest(ranks[0].said, of)


def two_ranks(jobs: Jobs, known: dict[str, str], of: str = "digest") -> str:
    """Return the digest of an undisturbed run on two ranks."""
    if "two ranks" not in known:
        ranks = jobs.start_ranks(2, SPOTGUARD_RUN_ID="undisturbed")
        assert codes(ranks) == [0, 0], ranks[0].said
        known["two ranks"] = ranks[0].said
    return digest(known["two ranks"], of)


@pytest.mark.parametrize("told", [0, 1], ids=["first", "second"])
def test_one_rank_is_told_and_both_leave(
    jobs: Jobs, undisturbed: dict[str, str], told: int
) -> None:
    """SIGTERM to one rank only: all save the same step and leave with 75, and resume exactly."""
    aim = two_ranks(jobs, undisturbed)
    ranks = jobs.start_ranks(2, each=lambda r: {"HURT": f"13:batch:{TERM}"} if r == told else {})
    assert codes(ranks) == [75, 75], "\n".join(job.said for job in ranks)
    [end] = jobs.ends()
    assert end["reason"] == "terminated"
    assert end["saved_step"] == end["step"] >= 14

    assert finished(jobs) == aim


@pytest.mark.parametrize("killed", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("where", ["begin", "changing"])
def test_a_rank_is_killed_and_the_other_saves(
    jobs: Jobs, undisturbed: dict[str, str], killed: int, where: str
) -> None:
    """kill -9 of one rank: the survivor saves the last finished step by itself, in seconds.

    The weights are the same on all ranks, so it does not matter whose are saved. BatchNorm's
    statistics are each rank's own without DDP: they are the first one's if that one survives.
    """
    of = "digest" if killed else "weights"
    aim = two_ranks(jobs, undisturbed, of)
    hurt = {"HURT": f"13:{where}:{KILL}"}
    ranks = jobs.start_ranks(2, each=lambda r: hurt if r == killed else {})
    assert ranks[killed].wait() == -9
    assert ranks[1 - killed].wait() == 75, ranks[1 - killed].said
    ends = jobs.ends()
    assert [end["reason"] for end in ends] == ["node_lost"]
    assert ends[0]["saved_step"] == (13 if where == "begin" else 14)

    assert finished(jobs, of=of) == aim


def test_a_frozen_rank_costs_the_grace_not_the_run(jobs: Jobs, undisturbed: dict[str, str]) -> None:
    """A rank that answers nothing and does not die: the other saves in time, without it."""
    aim = two_ranks(jobs, undisturbed)
    ranks = jobs.start_ranks(
        2, each=lambda r: {"HURT": "13:begin:SIGSTOP"} if r else {}, SPOTGUARD_GRACE_S=4
    )
    ranks[1].wait_for("hurt at 13")
    ranks[0].kill(signal.SIGTERM)
    assert ranks[0].wait() == 75, ranks[0].said
    ranks[1].kill(signal.SIGKILL)
    [end] = jobs.ends()
    assert end["reason"] == "terminated"
    assert end["saved_step"] == 13

    assert finished(jobs) == aim


@pytest.mark.parametrize("frozen", [0, 1], ids=["first", "second"])
def test_a_rank_that_freezes_is_found_by_its_silence(
    jobs: Jobs, undisturbed: dict[str, str], frozen: int
) -> None:
    """Nobody is told anything, and the collective hangs: the other saves by itself and leaves.

    The first rank takes the rendezvous with it: calls to that hang, too.
    """
    of = "digest" if frozen else "weights"
    aim = two_ranks(jobs, undisturbed, of)
    ranks = jobs.start_ranks(
        2,
        each=lambda r: {"HURT": "13:begin:SIGSTOP"} if r == frozen else {},
        SPOTGUARD_PEER_TIMEOUT="2s",
    )
    assert ranks[1 - frozen].wait() == 75, ranks[1 - frozen].said
    ranks[frozen].kill(signal.SIGKILL)
    [end] = jobs.ends()
    assert end["reason"] == "node_lost"
    assert f"rank {frozen} is gone: its process is silent for 6 s" in end["message"]
    assert end["saved_step"] == 13

    assert finished(jobs, of=of) == aim


def test_told_to_stop_beside_a_frozen_rank_it_says_that_it_left_alone(jobs: Jobs) -> None:
    """The signal may be all that is heard of a node's death: the end says who did not answer."""
    ranks = jobs.start_ranks(
        2,
        each=lambda r: {"HURT": "13:begin:SIGSTOP"} if r else {},
        SPOTGUARD_PEER_TIMEOUT="30s",
    )
    ranks[1].wait_for("hurt at 13")
    ranks[0].kill(signal.SIGTERM)
    assert ranks[0].wait() == 75, ranks[0].said
    ranks[1].kill(signal.SIGKILL)
    [end] = jobs.ends()
    assert (end["reason"], end["solo"], end["saved_step"]) == ("terminated", True, 13)


@pytest.mark.parametrize("slow", [{}, {"SLOW_EVENTS": 0.5}], ids=["quick store", "slow store"])
def test_a_death_after_the_last_step_loses_nothing(
    jobs: Jobs, undisturbed: dict[str, str], slow: dict[str, Any]
) -> None:
    """All steps are done, and a rank dies before the final save: the other saves it by itself.

    With a slow store its last word takes longer than a rank without its peer is given to leave.
    """
    aim = two_ranks(jobs, undisturbed)
    hurt = {"HURT": f"23:end:{KILL}"}
    ranks = jobs.start_ranks(2, each=lambda r: hurt if r else {}, **slow)
    assert codes(ranks) == [0, -9], ranks[0].said
    assert digest(ranks[0].said) == aim
    [end] = jobs.ends()
    assert (end["reason"], end["saved_step"]) == ("finished", 24)


def test_a_death_among_many_is_told_to_all(jobs: Jobs, undisturbed: dict[str, str]) -> None:
    """kill -9 of one of four, whose workers keep its connections open: three leave, saved once."""
    more: dict[str, Any] = {"WORKERS": 1}
    aim = finished(jobs, 4, "weights", SPOTGUARD_RUN_ID="undisturbed", **more)
    hurt = {"HURT": f"13:begin:{KILL}"}
    ranks = jobs.start_ranks(4, each=lambda r: hurt if r == 2 else {}, **more)
    assert codes(ranks) == [75, 75, -9, 75], "\n".join(job.said for job in ranks)
    assert {end["reason"] for end in jobs.ends()} == {"node_lost"}
    assert {end["saved_step"] for end in jobs.ends()} == {13}

    assert finished(jobs, 4, "weights", **more) == aim


def test_the_scripts_own_failure_is_told_once(jobs: Jobs) -> None:
    """One rank raises: the run's end is that failure, not the peer that vanished because of it."""
    ranks = jobs.start_ranks(2, each=lambda r: {"HURT": "13:batch:raise"} if r else {})
    assert ranks[1].wait() == 1
    ranks[0].wait()

    reasons = [end["reason"] for end in jobs.ends()]
    assert reasons == ["failed"]
    assert "ValueError: the script's own mistake" in jobs.ends()[0]["message"]


def test_ddp_and_another_number_of_ranks(jobs: Jobs) -> None:
    """Saved by two ranks in DDP, finished by one without, and the other way round."""
    env: dict[str, Any] = {"HURT": f"13:batch:{TERM}"}
    ranks = jobs.start_ranks(2, DDP=1, **env)
    assert codes(ranks) == [75, 75], ranks[0].said
    said = jobs.run(HURT=f"18:batch:{TERM}", code=75)
    assert "resumed at step 1" in said
    finished(jobs, 2, DDP=1)

    started = [event.data for event in jobs.events() if event.kind == "started"]
    assert [data["world_size"] for data in started] == [2, 1, 2]
    assert started[2]["resumed_step"] == 19


def test_how_long_a_start_took_is_told(jobs: Jobs) -> None:
    """When the node was up, `init` called, the state restored, the first step done: in order."""
    up_at = time.time()
    env: dict[str, Any] = {"SPOTGUARD_NODE_UP_AT": str(up_at), "HURT": f"13:batch:{TERM}"}
    ranks = jobs.start_ranks(2, DDP=1, **env)
    assert codes(ranks) == [75, 75], ranks[0].said
    (started,) = [event for event in jobs.events() if event.kind == "started"]
    (first,) = [event for event in jobs.events() if event.kind == "first_step"]

    assert from_iso(started.data["node_up_at"]) == pytest.approx(up_at, abs=0.001)
    assert up_at <= from_iso(started.data["init_at"]) <= started.at <= first.at
    assert first.data == {"step": 1}


BUSY_AT_THE_END = """
import torch
import spotguard.runtime as spotguard
from spotguard.runtime.reporting.node_reports import Reporter

# Each heartbeat asks torch for the loss; here it is in C++ all the time.
Reporter._beat = lambda self: torch.mm(torch.ones(400, 400), torch.ones(400, 400))
run = spotguard.init()
data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.track(model=model, optimizer=optimizer)
for step in run.steps(run.loader(data, global_batch_size=4, micro_batch_size=2), total=2):
    for x, y in step:
        step.backward(model(x).sum())
    optimizer.step()
"""


def test_the_process_ends_without_a_crash(tmp_path: Path) -> None:
    """No thread of ours is in C++ when the interpreter ends, which would abort a finished job."""
    script = tmp_path / "busy.py"
    script.write_text(BUSY_AT_THE_END)
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "SPOTGUARD_HEARTBEAT_S": "0.0001"},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
