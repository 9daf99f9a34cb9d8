"""What a process of a smoke proves, of facts that are laid out by hand."""

from __future__ import annotations

import re
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import spotguard
from spotguard.control.drill.smoke.places import Code, CodeLine
from spotguard.control.drill.smoke.process import Facts, Told
from spotguard.control.drill.smoke.verdict import (
    Stopped,
    Unproven,
    judge,
    nothing_learned,
)
from spotguard.events.event import Event, JobEvent

if TYPE_CHECKING:
    from spotguard.control.drill.smoke.verdict import Verdict

SCRIPT = """import torch
run.track(model=model)
for step in run.steps(loader, total=100):
    for x in step:
        step.backward(model(x))
"""
LEARNS = SCRIPT.replace(
    "torch\nrun.track(model=model)",
    "torch; optimizer = torch.optim.SGD(model.parameters())\n"
    "run.track(model=model, optimizer=optimizer)",
)
INSTALLED = "/venv/lib/python3.11/site-packages/torch/nn/functional.py"


@pytest.fixture
def code(tmp_path: Path) -> Code:
    """Return the code of a script."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return Code(str(tmp_path / "train.py"), str(tmp_path))


def told(code: Code, **more: Any) -> Told:
    """Return an error at line 5, deep in torch."""
    script = str(code.last.file)
    given: dict[str, Any] = {
        "kind": "RuntimeError",
        "message": "no",
        "hint": "",
        "is_exit": False,
        "exit_code": None,
        "frames": ((script, 3), (script, 5), (INSTALLED, 2)),
    }
    return Told(**{**given, **more})


def judged(facts: Facts, code: Code, *, ready_made: bool = False) -> Verdict:
    """Return the verdict on a process that was to do two steps."""
    return judge(facts, code, stop_after=2, ready_made=ready_made)


def event(kind: JobEvent, **data: Any) -> Event:
    """Return an event of the job."""
    return Event(kind=kind.value, at=1.0, attempt=1, data=data)


def test_only_a_save_after_the_last_step_is_a_pass(code: Code) -> None:
    """An exit code proves nothing: the script may have any."""
    saved = event(JobEvent.ENDED, reason="preempted", saved_step=2, step=2)
    assert judged(Facts(exit_code=75, steps=2, in_loop=True, events=(saved,)), code) is None
    failed = event(JobEvent.SAVE_FAILED, problem="no room for it")
    verdict = judged(Facts(exit_code=75, steps=2, in_loop=True, events=(failed,)), code)
    assert isinstance(verdict, Stopped)
    assert verdict.what.startswith("train.py line 2 (`run.track(model=model)`): the state after ")
    assert "no room for it" in verdict.what


def test_the_innermost_line_of_the_users_own_is_blamed(code: Code) -> None:
    """Not torch's, which raises it, nor ours."""
    verdict = judged(Facts(exit_code=1, in_loop=True, told=told(code)), code)
    assert isinstance(verdict, Stopped)
    assert verdict.what == "train.py line 5 (`step.backward(model(x))`): RuntimeError: no"
    assert verdict.may_be_size


def test_an_error_that_no_batch_causes_is_not_tried_again(code: Code) -> None:
    """Neither what says CUDA nor what is no error of sizes; nor one before the loop."""
    cuda = told(code, message="Found no NVIDIA driver on your system")
    for told_, in_loop in (
        (cuda, True),
        (told(code, kind="KeyError"), True),
        (told(code), False),
    ):
        verdict = judged(Facts(exit_code=1, in_loop=in_loop, told=told_), code)
        assert isinstance(verdict, Stopped)
        assert not verdict.may_be_size
        assert ("run.device" in verdict.hint) is (told_ is cuda)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (Facts(exit_code=-9), "memory"),
        (Facts(exit_code=None, ended_for="memory"), "memory"),
        (Facts(exit_code=None, ended_for="disk"), "room"),
    ],
)
def test_a_small_machine_proves_nothing(code: Code, facts: Facts, why: str) -> None:
    """Nodes are larger, and a launch is not refused for it."""
    verdict = judged(facts, code)
    assert isinstance(verdict, Unproven)
    assert why in verdict.why


def test_allocators_words_are_of_memory_and_cudas_are_not(code: Code) -> None:
    """torch has words of its own for both."""
    words = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 10 bytes"
    assert isinstance(judged(Facts(exit_code=1, told=told(code, message=words)), code), Unproven)
    assert isinstance(
        judged(Facts(exit_code=1, told=told(code, message="CUDA out of memory")), code), Stopped
    )


def test_what_torch_computes_at_the_end_of_the_time_is_slow_and_not_wrong(code: Code) -> None:
    """Within the loop a busy CPU that is in torch proves nothing; one that idles waits for ever."""
    stacks = f"""Thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x2 (most recent call first):
  File "{INSTALLED}", line 9 in linear
  File "{code.last.file}", line 5 in <module>
  File "<frozen runpy>", line 88 in _run_code
  File "/x/spotguard/launch/local/smoke_driver.py", line 37 in main
"""
    late = Facts(
        exit_code=None, ended_for="time", in_loop=True, busy=1.9, seconds=50, stacks=stacks
    )
    verdict = judged(late, code)
    assert isinstance(verdict, Unproven)
    assert "step 1 is not done after 50 s" in verdict.why
    mine = stacks.replace(INSTALLED, "/home/me/mine.py")
    loads = stacks.replace(INSTALLED, SSL)
    for may_come in (
        replace(late, stacks=mine),  # a product of two matrices has no frame of its own
        replace(late, in_loop=False),  # texts are cut into tokens
        replace(late, in_loop=False, busy=0.01, stacks=loads),
    ):
        assert isinstance(judged(may_come, code), Unproven)
    for other, words in (
        (replace(late, busy=0.01), "step 1 does not end: after 50 s it is still there, waiting"),
        (replace(late, in_loop=False, busy=0.01), "the training loop is not reached"),
        (replace(late, in_loop=False, stacks=mine), "the training loop is not reached"),
    ):
        verdict = judged(other, code)
        assert isinstance(verdict, Stopped)
        assert words in verdict.what


def test_what_only_nodes_have_is_not_held_against_a_script(code: Code) -> None:
    """Files of a cluster's own disks, rights of a node's role, kernels that need a GPU."""
    scratch = told(code, kind="FileNotFoundError", message="No such file: '/scratch/tokens.bin'")
    facts = Facts(exit_code=1, told=scratch)
    assert isinstance(judged(facts, code, ready_made=True), Unproven)
    assert isinstance(judged(facts, code), Stopped)
    beside = told(code, kind="FileNotFoundError", message=f"'{Path(code.last.file).parent}/a.bin'")
    assert isinstance(judged(Facts(exit_code=1, told=beside), code, ready_made=True), Stopped)
    role = told(code, kind="NoCredentialsError", message="Unable to locate credentials")
    assert isinstance(judged(Facts(exit_code=1, told=role), code), Unproven)
    kernel = told(code, message="flash_attn needs CUDA tensors")
    facts = Facts(exit_code=1, in_loop=True, told=kernel)
    assert isinstance(judge(facts, code, stop_after=2, gpus=True), Unproven)
    assert isinstance(judge(facts, code, stop_after=2), Stopped)


def test_a_crowded_machine_is_no_sign_of_a_script_that_waits(code: Code) -> None:
    """Where nobody has a core, little work proves nothing; imports are then not to blame either."""
    stacks = f"""Current thread 0x2 (most recent call first):
  File "<frozen importlib._bootstrap>", line 9 in _find
  File "{code.last.file}", line 1 in <module>
  File "/x/spotguard/launch/local/smoke_driver.py", line 37 in main
"""
    crowded = Facts(exit_code=None, ended_for="time", busy=0.1, idle=0.0, seconds=50, stacks=stacks)
    assert isinstance(judged(crowded, code), Unproven)
    hangs = judged(replace(crowded, idle=1.5), code)
    assert isinstance(hangs, Stopped)
    assert "it is still there, waiting" in hangs.what
    own = replace(crowded, stacks=stacks.replace("<frozen importlib._bootstrap>", "/usr/lib/x.py"))
    verdict = judged(own, code)
    assert isinstance(verdict, Stopped)
    assert "waiting" not in verdict.what


def test_a_module_that_the_nodes_may_have_is_no_reason(code: Code) -> None:
    """An image or set-up commands bring what nobody here can see; torch is installed anyway."""
    lack = told(code, kind="ModuleNotFoundError", message="No module named 'flash_attn.ops'")
    facts = Facts(exit_code=1, told=lack)
    assert isinstance(judged(facts, code), Stopped)
    assert isinstance(judged(facts, code, ready_made=True), Unproven)
    bare = told(code, kind="ModuleNotFoundError", message="No module named 'torch'")
    assert isinstance(judged(Facts(exit_code=1, told=bare), code), Unproven)


def test_data_that_only_nodes_have_is_no_reason(code: Code) -> None:
    """What is mounted there need not be here."""
    words = f"[Errno 2] No such file or directory: '{Path.home()}/data/x.bin'"
    facts = Facts(exit_code=1, told=told(code, kind="FileNotFoundError", message=words))
    assert isinstance(judged(facts, code), Stopped)
    assert isinstance(judge(facts, code, stop_after=2, mounted=["/other"]), Stopped)
    assert isinstance(judge(facts, code, stop_after=2, mounted=["/other", "~/data"]), Unproven)


def test_the_worker_of_a_loader_is_blamed_by_the_line_in_its_words(code: Code) -> None:
    """Its traceback comes as a part of a text."""
    message = (
        "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call "
        f'last):\n  File "{INSTALLED}", line 1, in fetch\n  File "{code.last.file}", line 1, in '
        "__getitem__\n    x\nKeyError: 7\n"
    )
    verdict = judged(Facts(exit_code=1, told=told(code, message=message)), code)
    assert isinstance(verdict, Stopped)
    assert verdict.what == "train.py line 1 (`import torch`): KeyError: 7"


def test_steps_in_a_loop_of_its_own_are_told_as_such(code: Code) -> None:
    """The runtime has seen them; that the loop is not reached would be half the truth."""
    seen = event(
        JobEvent.WARNING,
        message="3 optimizer steps were taken outside of a loop of "
        "spotguard: nothing is saved; three ways in: ...",
    )
    verdict = judged(Facts(exit_code=None, ended_for="time", events=(seen,)), code)
    assert isinstance(verdict, Stopped)
    assert "it trains in no loop of spotguard" in verdict.what
    assert "three ways" not in verdict.what
    ended = event(JobEvent.ENDED, reason="unprotected", message="20 optimizer steps")
    verdict = judged(Facts(exit_code=10, events=(ended,)), code)
    assert isinstance(verdict, Stopped)
    assert "20 optimizer steps" in verdict.what


def test_a_script_of_odd_bytes_still_has_lines(tmp_path: Path) -> None:
    """What cannot be shown is left out of a sentence."""
    path = tmp_path / "train.py"
    path.write_bytes(b"x = '\x1b[31m'\ny = " + b"1 + " * 90 + b"1\n")
    code = Code(str(path), str(tmp_path))
    assert code.told(CodeLine(str(path), 1)) == "train.py line 1 (`x = '[31m'`)"
    assert code.told(CodeLine(str(path), 2)).endswith("...`)")
    assert code.told(CodeLine(str(path), 99)) == "train.py line 99"
    assert code.told(CodeLine("/gone.py", 2)) == "/gone.py line 2"
    assert code.told(None) == "train.py"


def test_what_rests_is_told_from_what_others_keep_from_the_cores(code: Code) -> None:
    """On a crowded machine little work is no proof; that no thread wants to work is one."""
    stacks = f"""Current thread 0x2 (most recent call first):
  File "{INSTALLED}", line 324 in wait
  File "{code.last.file}", line 3 in <module>
  File "/x/spotguard/launch/local/smoke_driver.py", line 37 in main
"""
    starved = Facts(
        exit_code=None, ended_for="time", in_loop=True, busy=0.05, idle=0.0, stacks=stacks
    )
    assert isinstance(judged(starved, code), Unproven)
    assert isinstance(judged(replace(starved, rests=False), code), Unproven)
    verdict = judged(replace(starved, rests=True), code)
    assert isinstance(verdict, Stopped)
    assert "train.py line 3 (" in verdict.what
    assert "waiting" in verdict.what


def test_processes_that_run_the_script_again_are_told(code: Code) -> None:
    """They never end, and nothing waits: what Python says in them is the proof."""
    stacks = f'Current thread 0x2:\n  File "{code.last.file}", line 1 in <module>\n'
    printed = "...\n        current process has finished its bootstrapping phase.\n..."
    late = Facts(exit_code=None, ended_for="time", busy=1.9, stacks=stacks, printed=printed)
    verdict = judged(late, code)
    assert isinstance(verdict, Stopped)
    assert "__main__" in verdict.hint


@pytest.mark.parametrize(
    ("seen", "lines", "says"),
    [
        ({}, "", r"train.py line 5 .*nothing calls optimizer.step\(\)"),
        (
            {},
            "    helpers.look(model)\n    s = lr_scheduler.StepLR(optimizer, 3)\n"
            "    optimizer.zero_grad()\n    rate = optimizer.param_groups[0]['lr']\n",
            r"nothing calls optimizer.step\(\)",
        ),
        ({}, "    optimizer.step\n    f(optimizer)\n", r"train.py line 6 .*for want of `\(\)`"),
        ({"stepped": True}, "    o.zero_grad()\n    o.step()\n", r"line 6 .*had a gradient"),
        ({"stepped": True, "foreign": True}, "    o.step()\n", r"line 2 .*none of the model's"),
    ],
)
def test_steps_that_change_no_weight_are_stopped(
    tmp_path: Path, seen: dict[str, Any], lines: str, says: str
) -> None:
    """Where it is certain that no later step changes one, either; the line is named."""
    script = tmp_path / "train.py"
    script.write_text(LEARNS + lines)
    verdict = nothing_learned(unlearned(**seen), Code(str(script), str(tmp_path)))
    assert isinstance(verdict, Stopped)
    assert re.search(says, verdict.what)


@pytest.mark.parametrize(
    "lines",
    [
        "    if step.number % 8 == 7: optimizer.step()\n",
        "    getattr(optimizer, 'step')()\n",
        "    schedule(optimizer.step)\n",
        "    helpers.train(model, optimizer)\n",  # which was never read
        "    trainer.optimizer = optimizer\n",
        "    helpers.train([optimizer])\n",
        "    optimizer = trainer.optimizer\n    run.track(again=optimizer, more=other)\n",
        "    run.track(**everything)\n",
        "    run.track(more=trainer.optimizer)\n",
    ],
)
def test_an_optimizer_that_may_step_later_is_only_told_of(tmp_path: Path, lines: str) -> None:
    """Gradients may be gathered over more steps than a smoke has."""
    script = tmp_path / "train.py"
    script.write_text(LEARNS + lines)
    said = nothing_learned(unlearned(), Code(str(script), str(tmp_path)))
    assert isinstance(said, str)
    assert "no optimizer has stepped yet" in said
    assert nothing_learned(Facts(exit_code=75), Code(str(script), str(tmp_path))) == ""


def unlearned(**seen: bool) -> Facts:
    """Return a process that told that nothing was learned."""
    data = {"steps": 2, "stepped": False, "foreign": False, **seen}
    return Facts(exit_code=75, events=(event(JobEvent.WARNING, message="so", unlearned=data),))


def thread(*files: str, name: str = "wait") -> str:
    """Return the stack of a thread, the innermost file first."""
    lines = [
        f'  File "{file}", line 9 in {name if n == 0 else "f"}' for n, file in enumerate(files)
    ]
    return "\n".join(["Thread 0x1 (most recent call first):", *lines, ""])


SITE = "/venv/lib/python3.11/site-packages"
SSL, SUBPROCESS, THREADING, SOCKET = (
    str(Path(sysconfig.get_paths()["stdlib"]) / name)
    for name in ("ssl.py", "subprocess.py", "threading.py", "socket.py")
)
HTTP = str(Path(SSL).parent / "http" / "client.py")
OURS = str(Path(spotguard.__file__).parent / "runtime" / "preemption" / "notices.py")


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize(
    ("others", "waits_in"),
    [
        (thread(SSL, f"{SITE}/urllib3/connection.py", THREADING), THREADING),
        (thread(f"{SITE}/s3transfer/tasks.py", THREADING), THREADING),
        (thread(SSL, HTTP, f"{SITE}/datasets/x.py", OURS, THREADING), THREADING),  # read ahead
        ("", f"{SITE}/huggingface_hub/file_download.py"),
        ("", f"{SITE}/fsspec/asyn.py"),
        ("", SUBPROCESS),
    ],
)
def test_a_download_is_no_fault_of_the_script(
    code: Code, others: str, waits_in: str, in_loop: bool
) -> None:
    """Whatever thread or program does it, before the loop and in it."""
    assert isinstance(judged(waiting(code, others, waits_in, in_loop), code), Unproven)


@pytest.mark.parametrize("in_loop", [False, True])
@pytest.mark.parametrize(
    ("others", "waits_in"),
    [
        ("", THREADING),
        ("", f"{SITE}/torch/distributed/rendezvous.py"),
        (thread(SOCKET, THREADING, name="accept"), THREADING),  # a server
        (thread(SOCKET, HTTP, OURS, THREADING), THREADING),  # the clouds' notices
        (thread(SUBPROCESS, THREADING), THREADING),  # a program beside it
        (thread("/home/requests/http/mine.py"), "/home/requests/venv/site-packages/torch/x.py"),
    ],
)
def test_what_waits_for_ever_is_told_whatever_runs_beside_it(
    code: Code, others: str, waits_in: str, in_loop: bool
) -> None:
    """A thread that waits for others, or looks for the clouds' notices, is no download."""
    assert isinstance(judged(waiting(code, others, waits_in, in_loop), code), Stopped)


def waiting(code: Code, others: str, waits_in: str, in_loop: bool) -> Facts:
    """Return a process whose main thread waits in a file, with its other threads."""
    main = thread(waits_in, str(code.last.file), "/x/spotguard/launch/local/smoke_driver.py")
    return Facts(exit_code=None, ended_for="time", in_loop=in_loop, busy=0.01, stacks=others + main)


@pytest.mark.parametrize("stacks", ["", "Thread 0x00007f00 (most recent call first):\n"])
def test_a_process_that_has_run_no_line_yet_is_judged(code: Code, stacks: str) -> None:
    """On a crowded machine Python itself is not up when time is over: no frame is written."""
    verdict = judged(Facts(exit_code=None, ended_for="time", stacks=stacks), code)
    assert isinstance(verdict, (Stopped, Unproven))
    assert not code.is_main_thread_in(stacks, frozenset({"subprocess.py"}))
