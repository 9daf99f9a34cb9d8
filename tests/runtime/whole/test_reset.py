"""One run after another in one process, as in a notebook: `spotguard.runtime.reset`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

import spotguard.runtime

if TYPE_CHECKING:
    from pathlib import Path

    from tests.runtime.harness.processes import Job, Jobs

pytestmark = pytest.mark.e2e

SCRIPT = """
import gc, hashlib, os, signal, sys, threading, time, traceback, weakref
import torch
import torch.distributed as dist
import spotguard.runtime as spotguard
from spotguard.errors import SpotguardError
from spotguard.storage.filesystem.store import FileStore

def say(*words):
    print(*words, flush=True)

def begin(**arguments):
    global run, model, optimizer, loader
    run = spotguard.init(save_every="2 steps", **arguments)
    data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
    if os.environ.get("DDP"):
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    run.track(model=model, optimizer=optimizer)
    loader = run.loader(data, global_batch_size=4, micro_batch_size=1)

def train_on(step):
    for x, y in step:
        step.backward(torch.nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()

def train(total, **arguments):
    begin(**arguments)
    for step in run.steps(loader, total=total):
        train_on(step)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    say("weights", run.rank, run.id, total, hashlib.sha256(weights).hexdigest())

def ours():
    return sorted(t.name for t in threading.enumerate() if t is not threading.main_thread())

def ours_end():
    end = time.monotonic() + 60
    while ours() and time.monotonic() < end:  # one may be on its last line
        time.sleep(0.01)
    return ours()

def hooks():
    everywhere = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    return len(everywhere) + len(optimizer._optimizer_step_pre_hooks)

{body}
"""
FIRST, SECOND = "train(4, run_id='one')", "train(8, run_id='one')"
ANEW = "train(4, run_id='other', store='elsewhere', seed=3)"


def script(jobs: Jobs, *lines: str) -> Path:
    """Return a script that can begin, train and tell, and does these lines."""
    path = jobs.folder / "job.py"
    path.write_text(SCRIPT.replace("{body}", "\n".join(lines)))
    return path


def run(jobs: Jobs, *lines: str, code: int = 0, **env: Any) -> str:
    """Run such a script, whose runs have the ids that it gives them, and return what it says."""
    return jobs.run(script(jobs, *lines), code=code, **{"SPOTGUARD_RUN_ID": "", **env})


def told(said: str, word: str) -> list[str]:
    """Return the lines that begin with a word."""
    return [line for line in said.splitlines() if line.startswith(word)]


def ends(jobs: Jobs) -> list[dict[str, Any]]:
    """Return how each attempt of the run `one` ended."""
    return [event.data for event in jobs.events("one") if event.kind == "ended"]


def move_away(jobs: Jobs, number: int) -> None:
    """Put the stores of the jobs so far out of the way of others."""
    for name in ("spotguard-runs", "elsewhere"):
        if (jobs.folder / name).exists():
            (jobs.folder / name).rename(jobs.folder / f"{name}-{number}")


def test_runs_of_one_process_are_as_those_of_several(jobs: Jobs) -> None:
    """The second goes on from the first one's save, the third begins anew; the bits are the same.

    Each is an attempt of its own, and its end is told.
    """
    fresh = "\n".join(run(jobs, line) for line in (FIRST, SECOND, ANEW))
    move_away(jobs, 1)
    reset = "spotguard.reset()"
    said = run(jobs, FIRST, reset, SECOND, reset, ANEW)

    assert len(told(said, "weights")) == 3
    assert told(said, "weights") == told(fresh, "weights")
    assert "resumed at step 4" in said
    assert jobs.claims("one") == {1, 2}
    found = [(end["reason"], end["saved_step"]) for end in ends(jobs)]
    assert found == [("finished", 4), ("finished", 8)]


def ranks(jobs: Jobs, *lines: str, **env: Any) -> list[str]:
    """Run two ranks of such a script, and return what each says."""
    started: list[Job] = jobs.start_ranks(
        2, script=script(jobs, *lines), SPOTGUARD_RUN_ID="", **env
    )
    codes = [job.wait() for job in started]
    assert codes == [0, 0], "\n".join(job.said for job in started)
    return [job.said for job in started]


@pytest.mark.parametrize("ddp", ["", "1"], ids=["plain", "DDP"])
def test_two_ranks_begin_anew_together(jobs: Jobs, ddp: str) -> None:
    """Words and the ring of the run before are not heard; no thread of it stays."""
    first, second = ranks(jobs, FIRST, DDP=ddp), ranks(jobs, SECOND, DDP=ddp)
    move_away(jobs, 1)
    both = ranks(
        jobs,
        FIRST,
        "spotguard.reset()",
        "say('left', ours_end(), hooks())",
        SECOND,
        "spotguard.reset()",
        "say('left', ours_end(), hooks())",
        DDP=ddp,
    )

    for rank in range(2):
        fresh = told(first[rank], "weights") + told(second[rank], "weights")
        assert told(both[rank], "weights") == fresh
        assert told(both[rank], "left") == ["left [] 0"] * 2
    assert "cannot look after its peers" not in "".join(both)
    assert [end["reason"] for end in ends(jobs)] == ["finished", "finished"]


STATE = """
def state():
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    fds = map("/proc/self/fd/{}".format, os.listdir("/proc/self/fd"))
    fds = [os.readlink(fd) for fd in fds if os.path.islink(fd)]
    return {
        "signal": signal.getsignal(signal.SIGTERM), "wakeup": wakeup, "hook": sys.excepthook,
        "exits": (sys.exit, exit, quit), "threads": torch.get_num_threads(),
        "group": dist.is_initialized(), "files": [f for f in fds if "-log" in f],
        "sockets": sum("socket" in f for f in fds),
    }

def handler(*_): pass
signal.signal(signal.SIGTERM, handler)
torch.set_num_threads(2)
before = state()
"""


@pytest.mark.parametrize("arguments", ["run_id='one'", "run_id='one', exact='bitwise'"])
def test_all_that_was_taken_is_given_back(jobs: Jobs, arguments: str) -> None:
    """Handlers, hooks, files, threads: nothing of the run is left, nor is it held by anything."""
    said = run(
        jobs,
        STATE,
        f"train(4, {arguments})",
        "taken, running = state(), ours()",
        "spotguard.reset()",
        "after = state()",
        "say('taken', sorted(k for k in before if taken[k] != before[k]))",
        "say('running', running)",
        "say('kept', {k: (before[k], after[k]) for k in before if after[k] != before[k]})",
        "say('left', ours_end())",
        "say('hooks', hooks())",
        "job = weakref.ref(run._job)",
        "del run, taken",
        "gc.collect()",
        "say('held', job() is not None)",
        SPOTGUARD_PROBE=jobs.folder / "probe-log",
        SPOTGUARD_TRACE_SAMPLES=jobs.folder / "trace-log",
        SPOTGUARD_NOTICE_FILE=jobs.folder / "notice",
        SPOTGUARD_DEADLINE_STOP_AT="4000000000",
    )

    taken = ["exits", "files", "group", "hook", "signal", "sockets", "wakeup"]
    bitwise = ["threads"] if "bitwise" in arguments else []
    assert told(said, "taken") == [f"taken {sorted(taken + bitwise)}"]
    assert "spotguard-stop" in told(said, "running")[0]
    assert told(said, "kept") == ["kept {}"]
    assert told(said, "left") == ["left []"]
    assert told(said, "hooks") == ["hooks 0"]
    assert told(said, "held") == ["held False"]


def test_without_a_run_nothing_happens() -> None:
    """In a notebook's first cell it does no harm, however often."""
    before = threading.enumerate()
    spotguard.runtime.reset()
    spotguard.runtime.reset()
    assert threading.enumerate() == before


def test_an_attempt_of_a_launcher_is_the_only_one(jobs: Jobs) -> None:
    """The controller counts processes by attempts; the refusal names no way that would be none."""
    lines = "begin()", "try: spotguard.reset()", "except SpotguardError as e: say('told', e)"
    said = run(jobs, *lines, "begin()", code=2, SPOTGUARD_RUN_ID="one", SPOTGUARD_ATTEMPT=1)
    assert "told spotguard.reset(): a launcher began this attempt" in said
    assert "called twice in one process (an attempt of a launcher is its process's only" in said


def test_a_refused_reset_changes_nothing(jobs: Jobs) -> None:
    """Within a step, also where its iterator is held: the run trains on to its end."""
    said = run(
        jobs,
        "begin(run_id='one')",
        "steps = run.steps(loader, total=4)",
        "for step in steps:",
        "    train_on(step)",
        "    try: spotguard.reset()",
        "    except SpotguardError as problem: say('refused', problem)",
    )
    assert len(told(said, "refused spotguard.reset() was called inside the loop")) == 4
    assert [end["saved_step"] for end in ends(jobs)] == [4]


def test_the_same_init_again_is_the_same_run(jobs: Jobs) -> None:
    """A cell that is run twice draws the same numbers; once something is tracked, it is refused."""
    said = run(
        jobs,
        "drawn = []",
        "for _ in range(2):",
        "    run = spotguard.init(run_id='one', seed=4)",
        "    drawn.append((id(run), torch.rand(1).item()))",
        "say('same', drawn[0] == drawn[1])",
        "run.track(seen={})",
        "try: spotguard.init(run_id='one', seed=4)",
        "except SpotguardError as problem: say(problem.hint)",
        "spotguard.reset()",
        "say('another', spotguard.init(run_id='one', seed=4) is not run, torch.rand(1).item() "
        "== drawn[0][1])",
    )
    assert "same True" in said
    assert "call spotguard.reset() before it" in said
    assert "another True True" in said
    assert jobs.claims("one") == set()


CELLS = """
sys.ps1 = "In : "

def cell(source):  # as IPython does: errors are shown, and sys.excepthook is not asked
    try:
        exec(compile(source, "cell", "exec"), globals())
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        say("shown", repr(sys.last_value))

LOOP = '''
for step in run.steps(loader, total=8):
    if step.number == 5: {at_5}
    train_on(step)
    if step.number == 5: {after_5}
'''

def loop(at_5="pass", after_5="pass"):
    return LOOP.format(at_5=at_5, after_5=after_5)

def again():
    spotguard.reset()
    cell("train(8, run_id='one')")
"""


@pytest.mark.parametrize(
    ("loop", "reason", "saved"),
    [
        ("at_5='raise ValueError(7)'", "failed", 4),
        ("at_5='raise KeyboardInterrupt'", "stopped", 5),
        ("at_5='break'", "finished", 5),
        ("after_5='break'", "finished", 6),
        ("at_5='continue'", "failed", 4),
    ],
)
def test_a_notebook_goes_on_after_its_loop_was_left(
    jobs: Jobs, loop: str, reason: str, saved: int
) -> None:
    """Interrupted, broken off, or in error: the end is told truly, and what is good is saved."""
    typo = "cell('1 / 0')"  # of no concern to the loop
    between = typo if "break" in loop else ""
    begin = typo, "begin(run_id='one')"
    said = run(jobs, CELLS, *begin, f"cell(loop({loop}))", between, "again()")
    first, second = ends(jobs)

    assert first["reason"] == reason, said
    assert f"resumed at step {saved}" in said
    assert (second["reason"], second["saved_step"]) == ("finished", 8)


def test_an_old_error_says_nothing_of_a_later_loop(jobs: Jobs) -> None:
    """The function that failed in the first run left its loop on purpose in the second."""
    said = run(
        jobs,
        CELLS,
        "def leave(by):",
        "    for step in run.steps(loader, total=8):",
        "        train_on(step)",
        "        if step.number >= 3:",
        "            if by: raise by",
        "            break",
        "begin(run_id='one')",
        "cell('leave(ValueError(7))')",
        "spotguard.reset()",
        "begin(run_id='one')",
        "cell('leave(None)')",
        "spotguard.reset()",
    )
    assert [end["reason"] for end in ends(jobs)] == ["failed", "finished"], said


def test_a_save_in_flight_is_waited_for(jobs: Jobs) -> None:
    """It may be the only one: a loop that failed right after it was begun loses nothing."""
    said = run(
        jobs,
        CELLS,
        "put, may = FileStore.put, threading.Event()",
        "def held(self, key, *args, **kwargs):",
        "    if key.endswith('manifest.json'): may.wait(60)",
        "    return put(self, key, *args, **kwargs)",
        "FileStore.put = held",
        "begin(run_id='one')",
        "cell(loop(at_5='raise ValueError(7)').replace('== 5', '== 2'))",
        "threading.Timer(0.5, may.set).start()",
        "spotguard.reset()",
    )
    [end] = ends(jobs)
    assert (end["reason"], end["saved_step"]) == ("failed", 2), said


def test_a_failed_last_save_is_raised_and_the_run_is_over(jobs: Jobs) -> None:
    """The store refuses what `break` left; the error is the caller's, the next run begins."""
    said = run(
        jobs,
        CELLS,
        "from spotguard.errors import StoreError",
        "begin(run_id='one')",
        "cell(loop(at_5='break'))",
        "run._job.keeper.saver.wait()",
        "put = FileStore.put",
        "def full(self, key, *args, **kwargs):",
        "    if 'checkpoints/' in key: raise StoreError('the disk is full')",
        "    return put(self, key, *args, **kwargs)",
        "FileStore.put = full",
        "cell('spotguard.reset()')",
        "FileStore.put = put",
        "say('left', ours_end())",
        "train(8, run_id='one')",
    )
    assert "the disk is full" in told(said, "shown")[0]
    assert told(said, "left") == ["left []"]
    assert "resumed at step 4" in said
    assert [end["reason"] for end in ends(jobs)] == ["store_failed", "finished"]


def test_who_was_told_to_stop_does_not_begin_anew(jobs: Jobs) -> None:
    """A SIGTERM that came after the loop ends the process at `reset`, with the code of one."""
    said = run(
        jobs,
        FIRST,
        "os.kill(os.getpid(), signal.SIGTERM)",
        "spotguard.reset()",
        "say('another life')",
        code=75,
    )
    assert "another life" not in said
