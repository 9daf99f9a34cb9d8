"""Ctrl-C while a data loader forks its workers."""

from __future__ import annotations

import subprocess
import sys

import pytest


def forking(
    where: str, *, handler: str = "", wait_ms: int = 60_000
) -> subprocess.CompletedProcess[str]:
    """Return what a process says that hears Ctrl-C in a hook of its first fork."""
    code = f"""
import os, signal, time
from spotguard.runtime.preemption.fork_signals import hold_ctrl_c_while_forking

pressed = False

def press(where):
    global pressed
    if where == {where!r} and not pressed:
        pressed = True
        signal.raise_signal(signal.SIGINT)
        print("the hook ran to its end", flush=True)

os.register_at_fork(before=lambda: press("before"), after_in_parent=lambda: press("after"))
signal.signal(signal.SIGINT, signal.default_int_handler)
{handler}
hold_ctrl_c_while_forking()
hold_ctrl_c_while_forking()
try:
    child = os.fork()
    if not child:
        os._exit(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)
    print("forked", flush=True)
    for _ in range({wait_ms}):
        time.sleep(0.001)
except KeyboardInterrupt:
    print("heard", flush=True)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    print("heard", flush=True)
"""
    # The thread that says it again is one: from Python 3.12 on a fork beside it is warned of.
    of_threads = ("-W", "ignore:This process:DeprecationWarning")
    command = [sys.executable, *of_threads, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)


@pytest.mark.e2e
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_ctrl_c_in_a_hook_is_heard_after_the_fork(where: str) -> None:
    """Raised inside it would be lost, and the hook's lock never given back."""
    said = forking(where)
    assert said.stdout.split("\n") == [
        *("the hook ran to its end", "forked", "heard", "0", "heard", ""),
    ]
    assert said.stderr == ""


def test_a_handler_of_the_script_is_left_alone() -> None:
    """Where it raises nothing, nothing is lost: it runs at once."""
    handler = "signal.signal(signal.SIGINT, lambda *_: print('own', flush=True))"
    code = forking("after", handler=handler, wait_ms=0).stdout.split("\n")
    assert code[:3] == ["own", "the hook ran to its end", "forked"]
