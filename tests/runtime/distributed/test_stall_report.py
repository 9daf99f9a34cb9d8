from __future__ import annotations

import threading
import time

from spotguard.runtime.distributed.rendezvous import Alone
from spotguard.runtime.distributed.stall_report import StillWatch, place_of_main_thread

WAITS, WORKS = (True, "train.py:7, in backward()"), (False, "train.py:9, in evaluate()")


def told_of(places: list[tuple[bool, str]]) -> list[str]:
    """Return what is told of ranks that stand still in these places; who waits is a step ahead."""
    told: list[str] = []
    words = Alone()
    steps = [4 if waits else 3 for waits, _ in places]
    watches = [
        StillWatch(
            rank,
            len(places),
            peer_timeout_s=0.02,
            connect=words.connect,
            progress=lambda step=step: (step, 2),  # type: ignore[misc]
            step_s=lambda: 0.0,
            tell=told.append,
            place=lambda place=place: place,  # type: ignore[misc]
        )
        for rank, (place, step) in enumerate(zip(places, steps, strict=True))
    ]
    for watch in watches:
        watch.start()
    for rank in range(len(places)):
        assert words.get(f"still/{rank}/{steps[rank]}", 20) is not None
    if any(waits for waits, _ in places):
        assert words.get("still/told/4", 20) is not None
    end = time.monotonic() + 20
    while not told and words.peek("still/told/4") and time.monotonic() < end:
        time.sleep(0.005)
    for watch in watches:
        watch.close(20)
    return told


def test_each_rank_says_where_it_is() -> None:
    """One sentence with all of them, told once for a step, by one of them."""
    [message] = told_of([WAITS, WORKS, WAITS])
    assert message.startswith("step 5 has stood still for ")
    assert "rank 0 in step 5 at train.py:7, in backward(), 2 micro-batches done" in message
    assert "rank 1 in step 4 at train.py:9, in evaluate()" in message
    assert "rank 2 in step 5 at train.py:7" in message


def test_ranks_that_are_all_busy_are_left_alone() -> None:
    """Nobody waits for another in an evaluation that all ranks run: there is nothing to tell."""
    assert told_of([WORKS, WORKS]) == []


def test_a_usual_step_is_no_standstill() -> None:
    """Where steps take long, nobody asks before five of them: nothing is said by any rank."""
    words, asked = Alone(), threading.Event()

    def usual_s() -> float:
        asked.set()
        return 3600.0

    watch = StillWatch(
        0, 1, peer_timeout_s=0.02, connect=words.connect, progress=lambda: (4, 2),
        step_s=usual_s, tell=lambda _: None, place=lambda: WAITS,
    )  # fmt: skip
    watch.start()
    for _ in range(8):  # looks, the last of them later than six times `peer_timeout`
        asked.clear()
        assert asked.wait(20)
    watch.close(20)
    assert words.peek("still/0/4") is None


def test_the_place_is_the_scripts_own_line() -> None:
    """The innermost line that is neither ours, nor torch's, nor of the standard library."""
    waits, place = place_of_main_thread()
    assert not waits
    assert place.startswith("test_stall_report.py:")
