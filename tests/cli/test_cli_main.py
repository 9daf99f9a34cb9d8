"""The command line as a whole: codes, flags, help, documents, and what it must not import."""

from __future__ import annotations

import inspect
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import spotguard
from spotguard import errors
from spotguard.cli import flags
from spotguard.cli.main import EXIT_CODES, app, main
from spotguard.spec.setting_catalogue import catalogue
from tests.cli import pictures
from tests.cli.fake_control import FakeControl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cli.conftest import Cli


REPOSITORY = Path(__file__).parents[2]

FLAGS_OF_UP = {
    "--nodes",
    "--nproc-per-node",
    "--infra",
    "--gpus",
    "--store",
    "--name",
    "--template",
    "--save-every",
    "--image",
    "--setup",
    "--file-mount",
    "--volume",
    "--cache",
    "--smoke",
    "--smoke-steps",
    "--smoke-limit",
    "--env",
    "--trust-script",
    "--budget",
    "--priority",
    "--team-budget",
    "--sweep",
    "--parallel",
    "--point-budget",
    "--sweep-metric",
    "--sweep-goal",
    "--sweep-prune",
    "--controller",
    "--deadline",
    "--start-at",
    "--work",
    "--market",
    "--on-demand",
    "--on-demand-infra",
    "--prefer",
    "--max-price",
    "--price",
    "--on-demand-price",
    "--allow-unknown-price",
    "--metadata",
    "--interrupt",
    "--mtbf",
    "--interrupt-seed",
    "--seed",  # its old name, hidden
    "--trace",
    "--speed-up",
    "--yes",
    "-y",
    "--detach",
    "-d",
    "--contact-patience",
    "--json",
}
COMMANDS = {
    "up",
    "plan",
    "simulate",
    "status",
    "history",
    "logs",
    "runs",
    "team",
    "sweep",
    "controller",
    "report",
    "profile",
    "dashboard",
    "metrics",
    "notify",
    "stop",
    "down",
    "resume",
    "adopt",
    "checkpoints",
    "drill",
    "exec",
    "ssh",
    "doctor",
    "init",
    "market",
    "config",
}
GROUPS = {
    "config": {"show"},
    "controller": {"status", "move", "down", "serve"},
    "market": {"show", "refresh"},
    "checkpoints": {"ls", "show", "verify", "prune", "archive", "pin", "unpin", "export"},
}


def click_commands() -> dict[str, Any]:
    """Return the commands as typer hands them to its parser."""
    from typer.main import get_command

    return dict(get_command(app).commands)  # type: ignore[attr-defined]


def exit_codes_of_errors() -> set[int]:
    """Return each code that an error of ours carries."""

    def children(of: type[errors.SpotguardError]) -> Iterator[type[errors.SpotguardError]]:
        yield of
        for child in of.__subclasses__():
            yield from children(child)

    return {error.exit_code for error in children(errors.SpotguardError)}


def python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run this Python in a process of its own, with spotguard importable."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environ},
    )


def test_the_commands_are_these() -> None:
    """A new command is a decision, not an accident."""
    found = click_commands()
    assert set(found) == COMMANDS
    groups = {name: set(found[name].commands) for name in found if hasattr(found[name], "commands")}
    assert groups == GROUPS


def test_the_flags_of_up_are_frozen() -> None:
    """New knobs go into the file; a flag is added on purpose, here and in the documents."""
    options = [p for p in click_commands()["up"].params if p.param_type_name == "option"]
    assert {name for option in options for name in option.opts} == FLAGS_OF_UP


def test_each_flag_belongs_to_the_setting_that_names_it() -> None:
    """The option, the setting and its documentation agree."""
    by_key = {field.key: field.flag for field in catalogue().values() if field.flag}
    assert {flag.key: flag.option for flag in flags.JOB_FLAGS} == by_key


@pytest.mark.parametrize(
    "command",
    sorted(COMMANDS - set(GROUPS))
    + [f"{group} {command}" for group in sorted(GROUPS) for command in sorted(GROUPS[group])],
)
def test_every_command_and_option_has_help(cli: Cli, command: str) -> None:
    """`--help` explains each command and each of its options, at 80 columns."""
    said = cli(*command.split(), "--help")
    assert said.code == 0
    assert f"Usage: spotguard {command}" in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    found = click_commands()
    for name in command.split():
        found = found[name] if isinstance(found, dict) else found.commands[name]
    assert found.help.splitlines()[0].endswith((".", "?"))  # type: ignore[attr-defined]
    assert all(p.help for p in found.params)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "command",
    ["", *sorted(COMMANDS)]
    + [f"{group} {command}" for group in sorted(GROUPS) for command in sorted(GROUPS[group])],
)
def test_help_speaks_no_python(cli: Cli, command: str) -> None:
    """No types in angle brackets, no braces: names stand as the documents write them."""
    said = cli(*command.split(), "--help").out
    assert not re.search(r"<\w+[\w \[\]]*>|[{}]|\[\[|int range", said), said


def test_the_usage_names_the_arguments(cli: Cli) -> None:
    """As in the documents: what is needed, and in brackets what is not."""
    assert "Usage: spotguard up [OPTIONS] SCRIPT [-- ARGS...]" in cli("up", "--help").out
    assert "Usage: spotguard status [OPTIONS] [RUN]" in cli("status", "--help").out
    assert "Usage: spotguard adopt [OPTIONS] URL" in cli("adopt", "--help").out


def test_help_breaks_lines_where_the_terminal_ends(cli: Cli) -> None:
    """Not where a docstring's lines end, which left single words on lines of their own."""
    lines = [line.rstrip() for line in cli("up", "--help").out.splitlines()]
    start = next(n for n, line in enumerate(lines) if "Shows the plan and asks first." in line)
    # Some versions of typer put no empty line between paragraphs.
    end = next(n for n, line in enumerate(lines) if n > start and line.endswith("--lr 3e-4"))
    paragraph = lines[start : end + 1]
    assert len(paragraph) > 1
    assert all(len(line) > 60 for line in paragraph[:-1])


def test_help_without_a_command(cli: Cli) -> None:
    """`spotguard` alone shows what there is, with the exit codes."""
    said = cli()
    assert said.code == 0
    assert "drill" in said.out
    assert "budget reached" in said.out
    assert "told by the sentence, not by the code" in " ".join(said.out.replace("│", " ").split())


def test_version(cli: Cli) -> None:
    """`--version` is one line."""
    assert cli("--version").out == f"spotguard {spotguard.__version__}\n"


def test_the_documented_exit_codes_are_those_of_the_errors() -> None:
    """The page and the help list each code once, and no other."""
    page = (REPOSITORY / "docs" / "exit-codes.md").read_text()
    listed = [int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    assert listed == sorted(exit_codes_of_errors() | {0})
    assert [int(code) for code in re.findall(r"(\d+) [a-z]", EXIT_CODES)] == listed


def test_an_unexpected_error_is_one_sentence_and_a_private_file(
    cli: Cli, control: FakeControl, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug shows no traceback, but keeps it where only the user can read it."""

    def broken(run_id: str) -> None:
        raise ZeroDivisionError("the\nproblem")

    monkeypatch.setattr(control, "view", broken)
    said = cli("status")
    assert said.code == 1
    assert "ZeroDivisionError: the;" in said.err
    assert "Traceback" not in said.err
    (kept,) = home.glob("crash-*.txt")
    assert "in broken" in kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0
    assert str(kept) in said.err
    monkeypatch.setenv("SPOTGUARD_DEBUG", "1")
    assert "in broken" in cli("status").err


def test_an_unexpected_error_without_a_writable_home_is_still_a_sentence(
    cli: Cli, control: FakeControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The traceback then goes to the temporary folder."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(control, "view", lambda run_id: 1 / 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    said = cli("status")
    assert said.code == 1
    assert str(tmp_path / "crash-") in said.err


def test_ctrl_c_in_a_plain_command_is_quiet(
    cli: Cli, control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No traceback; the shell's own code."""

    def interrupted(text: str | None) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(control, "find_run", interrupted)
    said = cli("history")
    assert said.code == 130
    assert "Traceback" not in said.err


def test_a_closed_pipe_is_quiet() -> None:
    """`spotguard --help | head -1` prints no complaint."""
    code = (
        "import sys, time; from spotguard.cli.main import main; "
        "from spotguard.cli.terminal import output; "
        "sys.stdin.readline(); [output.say('x' * 999) for _ in range(999)]"
    )
    wrapped = code.replace("[output", "import typer; main.__globals__['app'] = lambda **k: [output")
    with subprocess.Popen(
        [sys.executable, "-c", wrapped + "; sys.exit(main())"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stdin.write(b"go\n")
        process.stdin.flush()
        assert process.wait(timeout=30) == 141
        assert process.stderr.read() == b""


def test_errors_stay_off_stdout_with_json(cli: Cli, control: FakeControl) -> None:
    """A program that reads stdout gets a document or nothing."""
    said = cli("status", "nobody", "--json")
    assert said.code == 2
    assert said.out == ""
    assert "nobody" in said.err


def test_the_stand_in_has_the_interface_of_the_real_controller() -> None:
    """What the tests of the commands prove holds for the real thing as well."""
    from spotguard.control import api

    for name, fake in inspect.getmembers(FakeControl, inspect.isfunction):
        if not name.startswith("_"):
            of_fake = list(inspect.signature(fake).parameters)[1:]
            assert of_fake == list(inspect.signature(getattr(api, name)).parameters), name


def test_what_is_not_a_number_is_null_in_json(cli: Cli, control: FakeControl) -> None:
    """JSON has no NaN; a strict parser must be able to read a diverged run."""
    control.views = [pictures.run(loss=float("nan"), eta_s=float("inf"))]

    def refuse(name: str) -> None:
        raise AssertionError(name)

    body = json.loads(cli("status", "--json").out, parse_constant=refuse)
    assert body["loss"] is None
    assert body["eta_s"] is None


@pytest.mark.usefixtures("quick_doctor")
def test_no_colour_without_a_terminal(cli: Cli, control: FakeControl) -> None:
    """Pipes and CI logs stay plain."""
    for command in (("status",), ("history",), ("runs",), ("doctor",), ("--help",)):
        assert "\x1b" not in cli(*command).out


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_colour_is_for_terminals_and_no_color_is_honoured(no_color: str, coloured: bool) -> None:
    """On a terminal there is colour, unless the user says NO_COLOR."""
    inside, outside = pty.openpty()
    try:
        code = (
            "from spotguard.cli.terminal.output import console; console().print('x', style='green')"
        )
        environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm-256color"}
        environ.pop("NO_COLOR", None)
        if no_color:
            environ["NO_COLOR"] = no_color
        subprocess.run([sys.executable, "-c", code], stdout=outside, env=environ, check=True)
        shown = os.read(inside, 1000)
    finally:
        os.close(outside)
        os.close(inside)
    assert (b"\x1b[32m" in shown) is coloured
    assert b"x" in shown


def test_the_command_line_imports_late() -> None:
    """`--help` costs no torch, no network library and nothing of the controller."""
    code = (
        "import sys; from spotguard.cli.main import main; main(['up', '--help']); "
        "heavy = {'torch', 'numpy', 'boto3', 'sky', 'requests', 'sqlite3', 'psutil', "
        "'spotguard.control', 'spotguard.spec', 'spotguard.policy.plan', 'spotguard.storage'}; "
        "sys.exit(' '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    said = python("-c", code)
    assert (said.returncode, said.stderr) == (0, "")


def test_a_terminal_without_utf8_gets_question_marks_not_a_crash() -> None:
    """An old locale must not keep anyone from stopping a run."""
    said = python(
        "-c",
        "from spotguard.cli.main import main; from spotguard.cli.terminal import output; "
        "main(['--version']); output.say('\\u2013 \\u2713 \\u2192')",
        PYTHONIOENCODING="ascii",
    )
    assert said.returncode == 0
    assert said.stdout.splitlines()[1] == "? ? ?"


def test_main_never_raises_for_nonsense(control: FakeControl) -> None:
    """Whatever is typed, an exit code comes back."""
    for arguments in (["\udcff"], ["status", "\0"], ["--"], ["up"], ["config", "shwo"], ["-x"]):
        assert main(arguments) in (0, 2)


def test_a_plain_look_is_quick() -> None:
    """Listing the runs of an empty home imports nothing that takes a second to import."""
    look = "import sys; from spotguard.cli.main import main; main(['runs']); print(*sys.modules)"
    said = python("-c", look)
    assert "no runs yet" in said.stdout
    loaded = set(said.stdout.split())
    assert not {"torch", "numpy", "sky", "boto3", "google", "azure"} & loaded
    assert not {"spotguard.control.sweep", "spotguard.control.report.profile"} & loaded, (
        "of others' answers"
    )


def test_an_error_that_nobody_expected_is_told_though_a_dependency_is_broken(
    tmp_path: Path,
) -> None:
    """What tells of it needs nothing that may be broken itself."""
    (tmp_path / "yaml.py").write_text("raise ImportError('broken')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "from spotguard.cli.main import main; sys.exit(main(['runs']))"
    )
    said = python("-c", code)
    assert said.returncode == 1
    assert "this is a bug of spotguard: ImportError: broken" in said.stderr


@pytest.mark.parametrize(("left", "code"), [(None, 0), (0, 0), (7, 7), ("it is full", 1)])
def test_a_library_that_exits_is_no_success(
    left: object, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it says is shown, as Python would show it."""

    def leave(**_: object) -> None:
        raise SystemExit(left)

    monkeypatch.setattr("spotguard.cli.main.app", leave)
    assert main([]) == code
    assert ("it is full" in capsys.readouterr().err) == (code == 1)


@pytest.mark.parametrize("words", [("status",), ("runs",), ("plan", "JOB"), ("up", "JOB", "-y")])
def test_a_user_without_any_home_is_told_what_to_set(
    cli: Cli, script: str, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """A container's user may have no HOME and no entry: one sentence, no traceback."""
    monkeypatch.delenv("SPOTGUARD_HOME", raising=False)

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", staticmethod(nobody))
    said = cli(*(script if word == "JOB" else word for word in words))
    assert said.code == 3
    assert "has no home folder" in said.err
    assert "SPOTGUARD_HOME" in said.err
    assert "bug" not in said.err
