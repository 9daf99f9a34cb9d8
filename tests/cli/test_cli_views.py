"""What the views promise: honest numbers, calm colours, no broken tables."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from spotguard.cli.views import formats, metrics
from spotguard.cli.views.attempts import attempts
from spotguard.cli.views.batch_curve import curve_screen
from spotguard.cli.views.history_table import by_day, happening
from spotguard.cli.views.recoveries import recoveries
from spotguard.cli.views.run import live, status
from spotguard.control.status.make_view import run_view
from spotguard.events.states import EndReason, RunState
from spotguard.policy.plan.batch_curve import BatchCurve, TriedSize
from tests.cli import pictures
from tests.control.made import made


def plain(what: RenderableType, width: int = 80) -> str:
    """Return what a console of this width would show, without colour."""
    console = Console(width=width, no_color=True, markup=False, highlight=False)
    with console.capture() as held:
        console.print(what)
    return held.get()


def coloured(what: RenderableType) -> str:
    """Return the same with escape codes."""
    console = Console(width=100, force_terminal=True, color_system="256", markup=False)
    with console.capture() as held:
        console.print(what)
    return held.get()


RED = re.compile(r"\x1b\[[0-9;]*\b(?:31|91|38;5;(?:1|9|160|196))m")


@pytest.mark.parametrize("width", [60, 76, 80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    """A table that is too wide would be wrapped by the terminal into noise."""
    for view in (pictures.run(), pictures.finished()):
        shown = plain(status(view, now=pictures.NOW, width=width), width)
        assert max(map(len, shown.splitlines())) <= width


@pytest.mark.parametrize("width", [50, 60, 76, 80, 100])
def test_numbers_are_never_cut(width: int) -> None:
    """At any width each attempt shows its steps, notice, age of the save, steps lost and cost."""
    row = pictures.attempt(
        12,
        first_step=10_000,
        last_step=20_000,
        notice_s=119.0,
        saved_before_end_s=65.0,
        steps_lost=123,
        cost_usd=1234.56,
    )
    shown = plain(attempts([row], width=width, demo=False), width)
    flat = " ".join(shown.split())
    for number in ("12", "10000→20000", "1 min 59 s", "1 min 05 s", "123", "$1,234.56"):
        assert number in flat
    assert "…" not in shown


def test_the_issue_of_each_attempt_is_told_in_words() -> None:
    """A reader learns why each of four attempts ended without knowing any enum."""
    shown = " ".join(plain(status(pictures.finished(), now=pictures.NOW, width=120), 120).split())
    for reason in ("preempted with notice, saved in time", "SIGTERM", "vanished without notice"):
        assert reason in shown


@pytest.mark.parametrize(
    "reason", [r for r in EndReason if r.retried or r in (EndReason.BUDGET, EndReason.STOPPED)]
)
def test_what_is_expected_is_never_red(reason: EndReason) -> None:
    """Preemptions are the business of this program, no alarm."""
    view = pictures.run(attempts=(pictures.attempt(1, end_reason=reason),))
    assert not RED.search(coloured(status(view, now=pictures.NOW, width=100)))
    assert not RED.search(coloured(live(view, [], now=pictures.NOW, width=100, height=40)))


def test_the_jobs_own_failure_is_red_and_shows_the_end_of_its_traceback() -> None:
    """A failed job shows the last lines, where the error is, and says how many are left out."""
    lines = "\n".join(f"frame {i}" for i in range(40)) + "\nValueError: [bold]no[/bold]"
    view = pictures.run(state=RunState.FAILED, traceback=lines)
    shown = plain(status(view, now=pictures.NOW, width=80))
    assert "ValueError: [bold]no[/bold]" in shown
    assert "frame 39" in shown
    assert "frame 20" not in shown
    assert "last 15 of 41 lines" in shown
    assert RED.search(coloured(status(view, now=pictures.NOW, width=100)))


def test_unknown_is_never_zero() -> None:
    """Where nothing is known the screen says so; a dollar amount is always a fact."""
    nothing = pictures.attempt(
        1,
        region=None,
        zone=None,
        instance_type=None,
        price_usd_per_h=None,
        cost_usd=None,
        notice_s=None,
        saved_before_end_s=None,
        steps_lost=None,
        first_step=None,
        last_step=None,
        end_reason=None,
        ended_at=None,
    )
    view = pictures.run(
        step=None,
        total_steps=None,
        loss=None,
        step_s=None,
        eta_s=None,
        spent_usd=None,
        on_demand_usd=None,
        saved_pct=None,
        goodput=None,
        saved_step=None,
        saved_at=None,
        attempts=(nothing,),
    )
    shown = plain(status(view, now=pictures.NOW, width=80))
    assert "unknown of $200.00" in shown
    assert "$0" not in shown
    assert " 0 %" not in shown
    assert "None" not in shown
    assert "no step seen yet" in shown


def test_a_loss_that_is_no_number_does_not_break_the_screen() -> None:
    """A diverged run can still be looked at."""
    view = pictures.run(loss=float("nan"))
    assert "loss nan" in plain(status(view, now=pictures.NOW, width=80))


def test_terminal_escapes_of_the_job_stay_inert() -> None:
    """Neither a traceback nor a detail can clear the screen or forge a line."""
    view = pictures.run(
        state=RunState.FAILED, state_detail="a\x1b[2Jb", traceback="x\x1b]0;owned\x07y\rz"
    )
    shown = plain(status(view, now=pictures.NOW, width=80))
    assert "\x1b" not in shown
    assert "\r" not in shown
    assert "owned" not in shown


@pytest.mark.parametrize("height", [12, 16, 24, 40])
@pytest.mark.parametrize("count", [1, 4, 60])
def test_the_live_view_fits_the_screen(height: int, count: int) -> None:
    """With sixty attempts the newest still shows, and nothing scrolls."""
    view = pictures.run(attempts=tuple(pictures.attempt(i + 1) for i in range(count)))
    shown = plain(live(view, pictures.history() * 5, now=pictures.NOW, width=80, height=height))
    assert f"\n{count} local" in shown
    assert "running" in shown
    if height >= 16:
        assert len(shown.splitlines()) <= height


def test_hidden_attempts_are_counted() -> None:
    """What the live view leaves out it says."""
    rows = [pictures.attempt(i + 1) for i in range(10)]
    assert "(7 earlier attempts not shown)" in plain(attempts(rows, width=80, demo=False, newest=3))


@pytest.mark.parametrize("width", [50, 60, 76, 80, 100])
def test_where_the_time_of_a_recovery_went_is_shown_at_any_width(width: int) -> None:
    """Each part in its own words; long ones are not cut, unknown ones are a dash."""
    long = {"release_s": 61.0, "waiting_s": 3605.0, "provision_s": 187.0, "total_s": 86_400.0}
    row = pictures.recovery(10, **long, restore_s=None)
    shown = plain(recoveries([row], width=width), width)
    flat = re.sub(r"\s+", "", shown)
    for part in ("#10→#11", "1.2s", formats.DASH, "7.4s", "0.1s", "provision", "setup"):
        assert part in flat
    assert "0.0s" not in flat
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width


def test_only_the_newest_recoveries_are_shown() -> None:
    """What is left out is counted; `status` shows the table only if there was a recovery."""
    rows = [pictures.recovery(number) for number in range(1, 9)]
    shown = plain(recoveries(rows, width=80))
    assert "(3 earlier recoveries not shown)" in shown
    assert "#3→#4" not in shown
    assert "#8→#9" in shown
    view = pictures.run()
    told = status(pictures.run(recoveries=tuple(rows[:1])), now=pictures.NOW, width=80)
    assert "detect" in plain(told)
    assert "detect" not in plain(status(view, now=pictures.NOW, width=80))


@pytest.mark.parametrize(
    ("pct", "said"),
    [(71.4, "71 % saved"), (-12.0, "12 % more than on demand"), (None, "saving unknown")],
)
def test_a_saving_is_told_honestly(pct: float | None, said: str) -> None:
    """Costing more than on demand is not 'minus 12 % saved'."""
    assert formats.saved_money(pct) == said


@pytest.mark.parametrize(
    ("share", "said"), [(0.0, "0 %"), (0.004, "< 1 %"), (0.999, "99 %"), (1.0, "100 %")]
)
def test_almost_is_not_all(share: float, said: str) -> None:
    """100 % means done, 0 % means nothing."""
    assert formats.percent(share) == said


@pytest.mark.parametrize("state", list(RunState))
def test_each_state_names_the_next_command(state: RunState) -> None:
    """Nobody has to look up what to do next; the command names the run."""
    shown = plain(status(pictures.run(state=state), now=pictures.NOW, width=80))
    assert "next  spotguard " in shown
    assert pictures.RUN in shown.split("next  spotguard ")[1]


def test_a_budget_pause_says_how_to_raise_it() -> None:
    """Exit 20 leads to `resume --budget`."""
    view = pictures.run(state=RunState.PAUSED, exit_code=20, lacks_budget_of=pictures.RUN)
    assert formats.next_commands(view) == [f"spotguard resume {pictures.RUN} --budget USD"]
    late = pictures.run(state=RunState.PAUSED, exit_code=21)
    assert formats.next_commands(late) == [f"spotguard resume {pictures.RUN} --deadline DURATION"]


_QUEUED = ("waiting", 1.0, None, {"retry_at": 9.0, "why": "no money", "team": True})
PAUSES: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "its own budget": ((), {"lacks_budget_of": "run"}, "resume job-1 --budget USD"),
    "its sweep's": ((_QUEUED,), {"lacks_budget_of": "sweep"}, "sweep lr-1 --budget USD"),
    "an unknown price": ((), {"lacks_budget_of": None}, "resume job-1"),
    "whose a newer version knows": ((), {"lacks_budget_of": "moon"}, "resume job-1"),
    "an earlier version's own": ((), {}, "resume job-1 --budget USD"),
    "an earlier version's sweep's": ((_QUEUED,), {}, "sweep lr-1 --budget USD"),
}


@pytest.mark.parametrize("why", PAUSES)
def test_more_money_is_advised_where_it_lacks(why: str) -> None:
    """Exit 20 is also for a price that nobody knows, and for the budget of a whole sweep."""
    lines, data, command = PAUSES[why]
    pause = {"state": "paused", "detail": "", "exit_code": 20, **data}
    record = made(*lines, ("settled", 2.0, None, pause))
    record = replace(record, sweep={"sweep_id": "lr-1"})
    view = run_view(record, live=None, now=3.0, controller_alive=False, store_url="x")
    assert formats.next_commands(view) == [f"spotguard {command}"]


def test_who_waits_for_money_is_told_from_who_finds_no_nodes() -> None:
    """As in the list of runs."""
    view = pictures.run(state=RunState.WAITING)
    assert "waiting for capacity" in plain(status(view, now=pictures.NOW, width=80))
    queued = replace(view, queued="another run holds the team's money")
    assert "waiting for capacity" not in plain(status(queued, now=pictures.NOW, width=80))
    assert "queued" in plain(status(queued, now=pictures.NOW, width=80))


def test_bars_read_the_same_without_colour() -> None:
    """A filled and an empty part differ in shape, and a little is not nothing."""
    assert formats.bar(0.5, 10, "green").plain == "━━━━━─────"
    assert formats.bar(0.001, 10, "green").plain == "━─────────"
    assert formats.bar(None, 4, "green").plain == "────"


def test_a_happening_is_one_line_with_time_attempt_and_cost() -> None:
    """CI logs can be searched by line."""
    said = happening(pictures.line("node 1 got\x1b[31m a notice", attempt=3, cost_usd=None))
    assert re.fullmatch(r"\d\d:\d\d:\d\d  #3 +node 1 got a notice", said)
    assert happening(pictures.line("x")).endswith(" #1      $0.0100  x")


@pytest.mark.parametrize("width", [60, 100])
def test_played_money_says_so_in_each_column(width: int) -> None:
    """In the table of attempts, beside what was bought on demand, and in each line of a story."""
    view = replace(pictures.finished(), demo_prices=True)
    shown = plain(status(view, now=pictures.NOW, width=width), width)
    assert "demo" in shown.partition("╰")[2], "below the panel"
    assert re.search(r"\$[\d.]+ demo for the same work", " ".join(shown.replace("│", "").split()))
    assert "demo" not in plain(status(pictures.finished(), now=pictures.NOW, width=width), width)
    assert "$0.0100 demo  x" in happening(pictures.line("x", demo_prices=True))


def test_metrics_stand_in_few_words() -> None:
    """The newest six of what was logged, where a step goes, and what is in use; else nothing."""
    told = dict(
        metrics.rows(
            {
                **{f"m{number}": float(number) for number in range(8)},
                "spotguard/step_s": 0.5,
                "spotguard/compute_s": 0.4,
                "spotguard/data_s": 0.1,
                "spotguard/samples_per_s": 64.0,
                "spotguard/node0/cpu_pct": 50.0,
                "spotguard/node0/rss_bytes": 2e9,
                "spotguard/node1/rss_bytes": 3e9,
                "spotguard/node0/gpu0/utilization_pct": 90.0,
                "spotguard/node1/gpu0/utilization_pct": 70.0,
                "spotguard/node0/gpu0/memory_bytes": 1e9,
                "spotguard/node0/gpu0/memory_total_bytes": 8e10,
                "spotguard/node0/gpu0/power_w": 300.0,
            }
        )
    )
    assert told["logged"] == "m2 2 · m3 3 · m4 4 · m5 5 · m6 6 · m7 7 · and 2 more"
    assert told["a step"] == "0.5 s: 80 % compute, 20 % data · 64 samples/s"
    assert told["in use"].startswith("2 GPUs 80 % · 1.0 GB of 80.0 GB · 300 W · CPU 50 %")
    assert told["in use"].endswith("3.0 GB of memory a node")
    assert dict(metrics.rows({})) == {}
    assert dict(metrics.rows({"loss": float("inf")})) == {"logged": "loss inf"}


def test_a_history_over_midnight_names_both_days() -> None:
    """A time of day alone would be ambiguous."""
    lines = [pictures.line(at=pictures.NOW + i * 43_200) for i in range(4)]
    days = [day for day, _ in by_day(lines)]
    assert len(days) == len(set(days)) >= 2
    assert sum(len(of_day) for _, of_day in by_day(lines)) == 4


def test_the_tried_size_next_to_what_is_taken_stands_out() -> None:
    """What is taken is a little less than was found to fit, and was mostly not tried itself."""
    tried = [
        TriedSize(samples=n, fits=n < 128, peak_bytes=10**9 if n < 128 else None, pass_s=1.0)
        for n in (2, 62, 128)
    ]
    curve = BatchCurve(
        memory_bytes=10**9,
        kept_free_bytes=None,
        global_batch_size=256,
        ranks=1,
        most=256,
        chosen=58,
        tried=tuple(tried),
    )

    def bold(curve: BatchCurve) -> list[str]:
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, width=80, color_system="standard")
        console.print(curve_screen(curve))
        rows = out.getvalue().splitlines()[2:]
        return [re.sub(r"\x1b\[[\d;]*m", "", row).split()[0] for row in rows if "\x1b[1" in row]

    assert bold(curve) == ["62"]
    assert bold(replace(curve, chosen=2)) == ["2"]
    assert bold(replace(curve, chosen=0)) == bold(replace(curve, chosen=None)) == []
