"""Calls side by side, in whatever moment of a process's life."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from spotguard.storage.deadline import give_up_after, remaining_s
from spotguard.storage.remote.thread_pool import Crew
from spotguard.testing import FakeClock


def test_calls_run_at_the_same_time_and_keep_their_order() -> None:
    """Four calls that wait for each other all return, in the order of their items."""
    together = threading.Barrier(4)

    def call(number: int) -> int:
        together.wait(10)
        return number

    with Crew(4, "test") as crew:
        assert crew.map(call, range(8)) == list(range(8))


def test_what_a_call_raises_reaches_who_asks() -> None:
    """And the thread lives on."""
    with Crew(1, "test") as crew:
        with pytest.raises(ZeroDivisionError):
            crew.submit(lambda: 1 // 0).result()
        assert crew.submit(lambda: 7).result() == 7


def test_the_callers_deadline_holds_in_the_threads() -> None:
    """A context of the caller's is the call's, too."""
    clock = FakeClock()
    with Crew(2, "test") as crew, give_up_after(5.0, clock):
        assert crew.submit(remaining_s).result() == 5.0


def test_threads_leave_with_the_crew() -> None:
    """Nothing is left of one that was used for a single listing."""
    before = threading.active_count()
    with Crew(8, "test-leaves") as crew:
        crew.map(str, range(100))
    for thread in threading.enumerate():
        if thread.name == "test-leaves":
            thread.join(10)
    assert threading.active_count() <= before


def test_a_forked_child_has_threads_of_its_own() -> None:
    """Its parent's are not there, though the crew was used before."""
    crew = Crew(2, "test")
    assert crew.submit(lambda: 1).result() == 1
    child = os.fork()
    if child == 0:
        os._exit(crew.submit(lambda: 3).result(10))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_it_works_when_the_interpreter_ends() -> None:
    """A script that left its loop makes its last save then, and concurrent.futures would refuse."""
    code = (
        "import atexit\n"
        "from spotguard.storage.remote.thread_pool import Crew\n"
        "crew = Crew(4, 'test')\n"
        "atexit.register(lambda: print(crew.map(abs, [-1, -2, -3])))\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[1, 2, 3]"
