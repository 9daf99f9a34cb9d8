"""However the script ends itself, the job says truly how it ended, and keeps what it can."""

from __future__ import annotations

import json
import signal
import time
from typing import TYPE_CHECKING

import pytest

from spotguard.shared.units import to_iso
from tests.runtime.state.test_best import kinds

if TYPE_CHECKING:
    from pathlib import Path

    from tests.runtime.harness.processes import Jobs

pytestmark = pytest.mark.e2e

SCRIPT = """
import os, signal, sys, threading, time, traceback, torch
import spotguard.runtime as spotguard
from spotguard.errors import StoreError
from spotguard.storage.filesystem.store import FileStore

def tell(run):
    os.kill(os.getpid(), signal.SIGTERM)
    while run._job.watch.agreed is None:
        time.sleep(0.01)

{first}

def main():
    run = spotguard.init(save_every="5 steps")
    {after_init}
    data = torch.utils.data.TensorDataset(torch.randn(24, 3), torch.randn(24, 1))
    model = torch.nn.Linear(3, 1)
    {wrap}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(run.loader(data, global_batch_size=4), total={steps}):
        if step.number == 12:
            {at_12}
        for x, y in step:
            step.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if step.number == 12:
            {after_12}
    {after_loop}

{call}
"""

GUARDED = """
try:
    main()
except Exception:
    traceback.print_exc()
    sys.exit(1)
"""
TERM = "os.kill(os.getpid(), signal.SIGTERM)"
EXITS_WHEN_TOLD = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))"


def script(jobs: Jobs, **places: str) -> Path:
    """Return a small training script with statements at some of its places."""
    usual = {
        "first": "", "after_init": "pass", "wrap": "pass", "at_12": "pass", "after_12": "pass",
        "after_loop": "pass", "call": "main()", "steps": "20",
    }  # fmt: skip
    path = jobs.folder / "job.py"
    path.write_text(SCRIPT.format(**{**usual, **places}))
    return path


TWICE_IN_ITS_SAVE = """
from spotguard.runtime.checkpoint.training_state import Keeper
save_for = Keeper.save_for
def told_again(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGTERM)
    return save_for(*args, **kwargs)
Keeper.save_for = told_again
"""


@pytest.mark.parametrize(
    ("places", "step"),
    [
        ({"first": EXITS_WHEN_TOLD, "at_12": "tell(run)"}, 12),
        ({"after_init": EXITS_WHEN_TOLD, "at_12": "tell(run)"}, 12),
        ({"first": EXITS_WHEN_TOLD, "after_12": "tell(run)"}, 13),
        ({"first": TWICE_IN_ITS_SAVE + EXITS_WHEN_TOLD, "after_12": "tell(run)"}, 13),
    ],
    ids=["body", "set after init", "after the optimizer", "in the save"],
)
def test_what_a_handler_of_the_scripts_raises_breaks_no_leaving(
    jobs: Jobs, places: dict[str, str], step: int
) -> None:
    """Its handler of SIGTERM exits with 0, wherever the script is: the step is ended and saved.

    The exit code is 75, nobody takes the run for finished, and the log says what was dropped.
    """
    job = jobs.start(script(jobs, **places))

    assert job.wait() == 75, job.said
    assert "own handler of SIGTERM raised SystemExit(0)" in job.said
    [end] = jobs.ends()
    assert (end["reason"], end["step"], end["saved_step"]) == ("terminated", step, step)


IN_A_THREAD = "t = threading.Thread(target=main); t.start(); t.join(); print('goes on')"
INIT_BEFORE = "begun = spotguard.init(save_every='5 steps')"


def test_a_training_in_a_thread_is_saved_and_ends_the_process(jobs: Jobs) -> None:
    """`SystemExit` would end the thread alone, and the script go on as if it had trained all."""
    job = jobs.start(script(jobs, first=INIT_BEFORE, call=IN_A_THREAD, after_12="tell(run)"))

    assert job.wait() == 75, job.said
    assert "goes on" not in job.said
    [end] = jobs.ends()
    assert (end["reason"], end["saved_step"]) == ("terminated", 13)


@pytest.mark.parametrize("fails", ["raise ValueError('a mistake')", "sys.exit('a mistake')"])
def test_a_training_that_fails_in_a_thread_has_not_finished(jobs: Jobs, fails: str) -> None:
    """Python shows the error and goes on; a process that hears no SIGTERM is told how it would."""
    job = jobs.start(script(jobs, call=IN_A_THREAD, after_12=fails))

    assert job.wait() == 1, job.said
    [end] = jobs.ends()
    assert (end["reason"], end["saved_step"]) == ("failed", 10)
    assert end["message"].endswith("a mistake")
    assert "call init() in the main thread" in job.said


def test_the_grace_is_not_spent_on_garbage(jobs: Jobs) -> None:
    """Told to stop, the script's exit handlers still run, and Python ends without collecting.

    It would walk all objects: seconds where big libraries are loaded. Another end is as ever.
    """
    first = "import atexit, gc\natexit.register(lambda: print('collects:', gc.isenabled()))"
    told = jobs.start(script(jobs, first=first, after_12=TERM))
    assert told.wait() == 75, told.said
    assert "collects: False" in told.said

    undisturbed = jobs.start(script(jobs, first=first))
    assert undisturbed.wait() == 0, undisturbed.said
    assert "collects: True" in undisturbed.said


def test_a_break_after_sigterm_is_no_finish(jobs: Jobs) -> None:
    """A handler that only sets a flag, and a loop that looks at it: saved where it was left."""
    job = jobs.start(
        script(
            jobs, first="signal.signal(signal.SIGTERM, lambda *_: None)", after_12=f"{TERM}; break"
        )
    )

    assert job.wait() == 75, job.said
    [end] = jobs.ends()
    assert (end["reason"], end["step"], end["saved_step"]) == ("terminated", 13, 13)


TERM_AND_FAILS = f"{TERM}; time.sleep(0.3); raise OSError('its helper is gone')"


@pytest.mark.parametrize(("place", "step"), [("at_12", 12), ("after_12", 10), ("after_loop", 20)])
def test_an_error_after_sigterm_is_part_of_the_stop(jobs: Jobs, place: str, step: int) -> None:
    """What shuts a machine down may end a script's helpers first: others follow, as after a stop.

    The error is told beside it. After half an optimizer's step the last save is the truth.
    """
    job = jobs.start(script(jobs, **{place: TERM_AND_FAILS}))

    assert job.wait() == 75, job.said
    assert "OSError: its helper is gone" in job.said
    [end] = jobs.ends()
    assert (end["reason"], end["saved_step"]) == ("terminated", step)
    assert end["message"].endswith("then the script failed: OSError: its helper is gone")

    assert jobs.run(script(jobs), SPOTGUARD_ATTEMPT=2)
    assert jobs.ends()[-1]["reason"] == "finished"


def test_sigterm_as_a_keyboard_interrupt_is_no_ctrl_c(jobs: Jobs) -> None:
    """Scripts treat both alike; the run was preempted, and is not stopped by its user."""
    first = "signal.signal(signal.SIGTERM, signal.default_int_handler)"
    job = jobs.start(script(jobs, first=first, at_12="tell(run)"))

    assert job.wait() == 75, job.said
    [end] = jobs.ends()
    assert (end["reason"], end["saved_step"]) == ("terminated", 12)


@pytest.mark.parametrize(
    ("left_s", "code", "reason"), [(120.0, 75, "preempted"), (86_400.0, 1, "failed")]
)
def test_an_error_while_a_machine_is_about_to_go(
    jobs: Jobs, left_s: float, code: int, reason: str
) -> None:
    """Its mounts go before its job hears of a signal; a notice for tomorrow explains nothing."""
    notice = jobs.folder / "notice"
    notice.write_text(json.dumps({"deadline_at": to_iso(time.time() + left_s)}))
    fails = "while not run._job.watch._pending: time.sleep(0.01)\n            raise OSError('gone')"
    job = jobs.start(script(jobs, at_12=fails), SPOTGUARD_NOTICE_FILE=notice)

    assert job.wait() == code, job.said
    [end] = jobs.ends()
    assert (end["reason"], end["saved_step"]) == (reason, 12 if code == 75 else 10)


def test_a_stop_that_ends_nothing_of_the_scripts_explains_no_error(jobs: Jobs) -> None:
    """Its user has stopped it, or its phase is done: the mistake is its own, and is told."""
    first = (
        "from spotguard.events.states import EndReason\n"
        "from spotguard.runtime.preemption.stop_consensus import StopRequest\n"
        "stop = StopRequest(reason=EndReason.STOPPED, message='stop')"
    )
    fails = (
        "run._job.watch.request(stop)\n"
        "            while run._job.watch.agreed is None: time.sleep(0.01)\n"
        "            raise ValueError('a mistake')"
    )
    job = jobs.start(script(jobs, first=first, at_12=fails))

    assert job.wait() == 1, job.said
    [end] = jobs.ends()
    assert (end["reason"], end["message"]) == ("failed", "ValueError: a mistake")


def test_ranks_that_track_other_things_are_refused_at_the_start(jobs: Jobs) -> None:
    """The first resume could not give the other ranks what only one has: hours later."""
    wrap = "run.rank or run.track(average=torch.nn.Linear(3, 1))"
    ranks = jobs.start_ranks(3, script=script(jobs, wrap=wrap))

    assert all(job.wait() for job in ranks)
    told = "".join(job.said for job in ranks)
    assert "run.track: rank" in told
    assert "tracks other names than another rank" in told


@pytest.mark.parametrize("victim", [0, 2])
def test_an_error_of_one_rank_after_sigterm_is_no_failure(jobs: Jobs, victim: int) -> None:
    """The others, told or not, take it for a rank that is gone, and are saved."""
    fails = f"if run.rank == {victim}: {TERM_AND_FAILS}"
    ranks = jobs.start_ranks(3, script=script(jobs, at_12=fails))

    assert [job.wait() for job in ranks] == [75] * 3, "\n".join(job.said for job in ranks)
    assert {end["reason"] for end in jobs.ends()} <= {"terminated", "node_lost"}
    assert {end["saved_step"] for end in jobs.ends()} == {12}


def test_handlers_of_one_rank_end_all(jobs: Jobs) -> None:
    """One rank's handler would leave in the middle of a step: all end it, and leave together."""
    told = "if run.rank == 1: tell(run)"
    ranks = jobs.start_ranks(3, script=script(jobs, first=EXITS_WHEN_TOLD, at_12=told))

    assert [job.wait() for job in ranks] == [75] * 3, "\n".join(job.said for job in ranks)
    [saved] = {end["saved_step"] for end in jobs.ends()}
    assert saved in (12, 13), "13 if another rank had entered it"
    assert "finished" not in {end["reason"] for end in jobs.ends()}


@pytest.mark.parametrize("leaves", ["break", "sys.exit()", "exit(0)"])
def test_who_leaves_on_purpose_has_finished(jobs: Jobs, leaves: str) -> None:
    """Nothing told it to, and it reports no error; a notice for some other day changes nothing."""
    notice = jobs.folder / "notice"
    notice.write_text('{"deadline_at": "2999-01-01T00:00:00+00:00"}')
    wait = "while not run._job.watch._pending: time.sleep(0.01)"
    job = jobs.start(script(jobs, after_init=wait, after_12=leaves), SPOTGUARD_NOTICE_FILE=notice)

    assert job.wait() == 0, job.said
    [end] = jobs.ends()
    assert (end["reason"], end["saved_step"]) == ("finished", 13)
    assert kinds(jobs)[13] == "final"


CAUGHT = "try: {}\n            except SystemExit: pass"


@pytest.mark.parametrize("call", ["sys.exit('nan')", "threading.Thread(target=sys.exit).start()"])
def test_an_exit_that_did_not_end_the_script_says_nothing(jobs: Jobs, call: str) -> None:
    """The script caught it, or it was a thread's: it trained on to its end."""
    job = jobs.start(script(jobs, at_12=CAUGHT.format(call)))

    assert job.wait() == 0, job.said
    [end] = jobs.ends()
    assert (end["reason"], end["saved_step"]) == ("finished", 20)


@pytest.mark.parametrize(
    ("at_12", "call", "message"),
    [
        ("raise ValueError('a mistake')", GUARDED, "ValueError: a mistake"),
        ("sys.exit('the loss is nan')", "main()", "SystemExit: the loss is nan"),
        ("exit(1)", "main()", "SystemExit: 1"),
    ],
    ids=["guarded", "sys.exit", "exit"],
)
def test_an_exit_with_an_error_is_a_failure(
    jobs: Jobs, at_12: str, call: str, message: str
) -> None:
    """The error that the script caught, or the exit itself, with where it was; code 1 stays."""
    job = jobs.start(script(jobs, at_12=at_12, call=call))

    assert job.wait() == 1, job.said
    [end] = jobs.ends()
    assert (end["reason"], end["message"], end["saved_step"]) == ("failed", message, 10)
    assert "in main\n" in end["traceback"]


def test_a_failing_exit_of_one_rank_ends_the_others_soon(jobs: Jobs) -> None:
    """They do not wait two minutes for its part of a final save; the failure is told once."""
    path = script(jobs, at_12="if run.rank: sys.exit('the loss is nan')")
    ranks = jobs.start_ranks(2, script=path)

    assert [job.wait() for job in ranks] == [1, 1], "\n".join(job.said for job in ranks)
    [end] = jobs.ends()
    assert (end["reason"], end["message"]) == ("failed", "SystemExit: the loss is nan")


def test_a_connection_of_the_scripts_own_is_no_peer(jobs: Jobs) -> None:
    """A metrics server that refuses is the script's failure, though there are other ranks."""
    refused = "import socket; run.rank and socket.create_connection(('127.0.0.1', 1))"
    ranks = jobs.start_ranks(2, script=script(jobs, at_12=refused))

    assert [job.wait() for job in ranks] == [1, 1], "\n".join(job.said for job in ranks)
    [end] = jobs.ends()
    assert end["reason"] == "failed"
    assert "ConnectionRefusedError" in end["message"]


def test_a_script_that_catches_the_loss_of_a_peer_is_saved(jobs: Jobs) -> None:
    """It exits with 1 because of it: the peer is what it ended of, as if it had not caught it."""
    path = script(jobs, at_12="if run.rank: os.kill(os.getpid(), signal.SIGKILL)", call=GUARDED)
    ranks = jobs.start_ranks(2, script=path)

    assert [job.wait() for job in ranks] == [75, -9], ranks[0].said
    [end] = jobs.ends()
    assert (end["reason"], end["saved_step"]) == ("node_lost", 12)


FORKS = """if os.fork() == 0:
                model.weight.data.zero_()
                {}
            else:
                os.wait()
                os.kill(os.getpid(), signal.SIGKILL)"""


@pytest.mark.parametrize("leaves", ["sys.exit(0)", "raise ValueError('of the child')"])
def test_a_fork_of_the_script_is_not_the_job(jobs: Jobs, leaves: str) -> None:
    """It ends as a script does: nothing is saved or said in the job's name."""
    job = jobs.start(script(jobs, after_12=FORKS.format(leaves)))

    assert job.wait() == -9
    assert max(kinds(jobs)) == 10
    assert jobs.ends() == []
    assert "ended at step" not in job.said
    assert ("of the child" in job.said) == ("child" in leaves)


SLOW_FINAL = """
inner = FileStore.put
def put(self, key, *args, **kwargs):
    if "manifest" in key and "000013" in key:
        print("committing", flush=True)
        while not os.path.exists("told"):
            time.sleep(0.01)
    return inner(self, key, *args, **kwargs)
FileStore.put = put
"""


def test_sigterm_during_the_final_save_does_not_kill(jobs: Jobs) -> None:
    """The loop was left by `break`, and the save takes its time: it is finished, then left."""
    job = jobs.start(script(jobs, first=SLOW_FINAL, after_12="break"))
    job.wait_for("committing")
    job.kill(signal.SIGTERM)
    (jobs.folder / "told").touch()

    assert job.wait() == 0, job.said
    [end] = jobs.ends()
    assert (end["reason"], end["saved_step"]) == ("finished", 13)


SHARDED = """from torch.distributed.fsdp import fully_shard
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (run.world_size,))
    fully_shard(model, mesh=mesh)"""
INTERRUPTED = """run._job.keeper.saver.wait()  # for the periodic save of step 10
            torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(20)"""


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("wrap", "code", "reason"), [("pass", 0, "finished"), (SHARDED, 75, "node_lost")]
)
def test_a_rank_lost_before_the_final_save_is_no_mistake_of_the_script(
    jobs: Jobs, wrap: str, code: int, reason: str, victim: int
) -> None:
    """Who holds all of the state saves it alone; who does not leaves it to the next attempt."""
    last = f"if run.rank == {victim}: os.kill(os.getpid(), signal.SIGKILL)"
    ranks = jobs.start_ranks(3, script=script(jobs, wrap=wrap, steps="13", after_12=last))

    codes = [job.wait() for job in ranks]
    assert codes == [-9 if rank == victim else code for rank in range(3)]
    assert {end["reason"] for end in jobs.ends()} == {reason}


def test_a_ctrl_c_that_cannot_be_saved_does_not_blame_the_store(jobs: Jobs) -> None:
    """Who holds a part of the model saves nothing alone: it was stopped, with the reason why."""
    ranks = jobs.start_ranks(3, script=script(jobs, wrap=SHARDED, at_12=INTERRUPTED))

    assert [job.wait() for job in ranks] == [75] * 3, "\n".join(job.said for job in ranks)
    ends = jobs.ends()  # who is slow may hear that another one is gone before its own Ctrl-C
    assert "stopped" in {end["reason"] for end in ends} <= {"stopped", "node_lost"}
    assert {(end["saved"], end["saved_step"]) for end in ends} == {(False, 10)}
    assert all("cannot be saved without the other ranks" in end["message"] for end in ends)


LATE = """
from spotguard.runtime.job import Job
from spotguard.runtime.preemption.stop_consensus import StopGate
begin, enter = Job.begin_training, StopGate.enter
def begin_late(self, *args):
    while str(self.rank) in "{late}" and self.watch.agreed is None:
        time.sleep(0.001)
    begin(self, *args)
def enter_told(self, finished):
    goes_on = enter(self, finished)
    if finished == 0 and os.environ["RANK"] == "2":
        {term}
    return goes_on
Job.begin_training, StopGate.enter = begin_late, enter_told
"""


@pytest.mark.parametrize("wrap", ["pass", SHARDED], ids=["replicas", "sharded"])
@pytest.mark.parametrize("late", ["0", "1", "01"])
def test_who_is_late_for_its_loop_stops_with_the_others(jobs: Jobs, wrap: str, late: str) -> None:
    """A rank that trains needs those in set-up for its step: all finish it, and save together."""
    path = script(jobs, first=LATE.format(late=late, term=TERM), wrap=wrap)
    ranks = jobs.start_ranks(3, script=path)

    assert [job.wait() for job in ranks] == [75] * 3, "\n".join(job.said for job in ranks)
    [end] = jobs.ends()
    assert (end["reason"], end["step"], end["saved_step"]) == ("terminated", 1, 1)


def test_nobody_begins_a_loop_after_a_stop_in_set_up(jobs: Jobs) -> None:
    """No rank trains when the stop is agreed, so none waits for another: all leave at once."""
    told = "if run.rank == 1: tell(run)"
    path = script(jobs, first=LATE.format(late="012", term="pass"), after_init=told)
    ranks = jobs.start_ranks(3, script=path)

    assert [job.wait() for job in ranks] == [75] * 3, "\n".join(job.said for job in ranks)
    [end] = jobs.ends()
    assert (end["reason"], end["step"], end["saved_step"]) == ("terminated", 0, None)


DIES = """
from spotguard.runtime.checkpoint import saver
write, told = saver.write_layout, []
def dying(store, prefix, *args, **kwargs):
    if os.environ["RANK"] == "0" and (told or "000020-" in prefix):
        os.kill(os.getpid(), signal.SIGKILL)
    return write(store, prefix, *args, **kwargs)
saver.write_layout = dying
"""
TOLD = f"""
            if run.rank == 0:
                told.append({TERM})
                while run._job.watch.agreed is None: time.sleep(0.001)
"""


def test_the_first_rank_dies_in_the_emergency_save(jobs: Jobs) -> None:
    """With it goes the rendezvous; the other one saves and says so by itself."""
    ranks = jobs.start_ranks(
        2, script=script(jobs, first=DIES, after_12=TOLD), SPOTGUARD_SAVE_EVERY="50 steps"
    )

    assert [job.wait() for job in ranks] == [-9, 75], ranks[1].said
    [end] = jobs.ends()
    assert end["reason"] == "terminated"
    assert end["saved_step"] == end["step"] >= 13


def test_the_first_rank_dies_in_the_final_save(jobs: Jobs) -> None:
    """All steps are done: the other one saves them, and finishes unless it was told of the loss."""
    ranks = jobs.start_ranks(2, script=script(jobs, first=DIES), SPOTGUARD_SAVE_EVERY="50 steps")

    codes = [job.wait() for job in ranks]
    [end] = jobs.ends()
    assert (*codes, end["reason"]) in ((-9, 0, "finished"), (-9, 75, "node_lost")), ranks[1].said
    assert end["saved_step"] == 20


IMPATIENT = """
from spotguard.events.states import EndReason
from spotguard.runtime import job
from spotguard.runtime.preemption.stop_consensus import StopRequest
job._EXIT_PATIENCE_S = 3.0
"""
BUDGET = """
            run.end()
            run._job.watch.request(StopRequest(reason=EndReason.BUDGET, message="no money"))
            while run._job.watch.agreed is None: time.sleep(0.001)
"""


def test_a_stop_in_the_last_step_ends_what_comes_after_the_loop(jobs: Jobs) -> None:
    """Asked to stop in no hurry, it may finish, but not go on for ever: money is at stake."""
    job = jobs.start(script(jobs, first=IMPATIENT, after_12=BUDGET, after_loop="time.sleep(600)"))

    assert job.wait() == 75, job.said
    [end] = jobs.ends()
    assert (end["reason"], end["saved_step"]) == ("budget", 13)


NO_ROOM = """
inner = FileStore.put
def put(self, key, *args, **kwargs):
    if {where!r} in key:
        raise StoreError("the bucket is gone")
    return inner(self, key, *args, **kwargs)
FileStore.put = put
"""


def test_a_failed_job_that_hangs_keeps_its_exit_code(jobs: Jobs) -> None:
    """A thread of the script outlives the failure: ended in its place, with 3 and not with 75."""
    hangs = "threading.Thread(target=time.sleep, args=(30,)).start()"
    job = jobs.start(
        script(jobs, first=IMPATIENT + NO_ROOM.format(where="manifest"), after_init=hangs)
    )

    assert job.wait() == 3, job.said
    assert [end["reason"] for end in jobs.ends()] == ["store_failed"]


def test_a_final_save_that_fails_is_told_by_the_exit_code(jobs: Jobs) -> None:
    """The loop was left by `break`: what it came to is not kept, so it is not code 0."""
    job = jobs.start(script(jobs, first=NO_ROOM.format(where="00013-"), after_12="break"))

    assert job.wait() == 3, job.said
    [end] = jobs.ends()
    assert (end["reason"], end["saved_step"]) == ("store_failed", 10)
