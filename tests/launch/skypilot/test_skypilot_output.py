"""What SkyPilot prints while it works must not spoil the documents that we print.

Nor is what it meets then a fault of ours.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from spotguard.errors import EnvironmentFailure
from spotguard.events.states import Market
from spotguard.launch.skypilot import import_sky, prices
from spotguard.launch.skypilot import sdk as sdk_module
from spotguard.launch.skypilot.prices import Place, survey
from spotguard.launch.skypilot.sdk import SkySdk
from spotguard.launch.taskyaml import Machine

if TYPE_CHECKING:
    from pathlib import Path

PAYLOAD = (
    '<sky-payload>"<rich_init>[bold cyan]Updating the catalogue[/] (7 h)</rich_init>"</sky-payload>'
)
WORDS = "Updating the catalogue (7 h)\n"


class LoudSky:
    """SkyPilot's package, which prints whatever it is asked, and knows nothing."""

    exceptions = SimpleNamespace(
        **dict.fromkeys(
            (
                *("ApiServerConnectionError", "ServerTemporarilyUnavailableError"),
                *("ClusterStatusFetchingError", "RequestInterruptedError"),
                "ResourcesUnavailableError",
            ),
            KeyError,
        )
    )

    def __getattr__(self, name: str) -> Any:
        return LoudSky()

    def __call__(self, *_: object, **__: object) -> Any:
        """Print, and return nothing of interest."""
        print(f"{PAYLOAD}\n", end="")  # noqa: T201 - as SkyPilot does
        return LoudSky()

    def __iter__(self) -> Any:
        return iter(())

    def __bool__(self) -> bool:
        return False


def test_a_survey_leaves_stdout_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SkyPilot's catalogues print `<sky-payload>` lines; a document on stdout stays one."""
    monkeypatch.setattr(prices, "load_sky", LoudSky)
    survey([Place.parse("slurm/lab/spot")], Machine(), market=Market.SPOT)
    said = capsys.readouterr()
    assert said.out == ""
    assert set(said.err.splitlines(keepends=True)) == {WORDS}


def test_a_question_to_the_sdk_leaves_stdout_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is asked, such as for the log of a job that is being printed."""
    monkeypatch.setattr(sdk_module, "load_sky", LoudSky)
    SkySdk().log("job-1")
    SkySdk().ours()
    said = capsys.readouterr()
    assert said.out == ""
    assert set(said.err.splitlines(keepends=True)) == {WORDS}


def test_the_import_of_skypilot_leaves_stdout_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its loggers keep the stdout that they see while it is imported: they get stderr."""
    catalog = tmp_path / "sky" / "catalog"
    catalog.mkdir(parents=True)
    (catalog / "common.py").touch()
    (catalog / "__init__.py").touch()
    (catalog.parent / "__init__.py").write_text("import sys; out = sys.stdout; print('hello')")
    with patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "sky"]:
            del sys.modules[name]
        monkeypatch.syspath_prepend(tmp_path)
        import_sky.load_sky().out.write("from a logger")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        ("a line of its own\n", "a line of its own\n"),
        ('<sky-payload>"<rich_exit></rich_exit>"</sky-payload>\n', ""),
        ('<sky-payload type="x">{"no": "words"}</sky-payload>\n', ""),
        ("<sky-payload>no JSON</sky-payload>\n", "<sky-payload>no JSON</sky-payload>\n"),
        (
            f"{PAYLOAD}\n{PAYLOAD.replace('init', 'update')}\nbetween\n{PAYLOAD}\n",
            f"{WORDS}between\n",
        ),
    ],
)
def test_what_a_spinner_should_show_is_told_as_words(
    capsys: pytest.CaptureFixture[str], printed: str, told: str
) -> None:
    """Its payloads are for a program; on a terminal each is a line of words, told once."""
    with import_sky.off_stdout():
        print(printed, end="")  # noqa: T201 - as SkyPilot does
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    "problem",
    [
        ClientError({"Error": {"Code": "RequestLimitExceeded"}}, "DescribeRegions"),
        EndpointConnectionError(endpoint_url="https://ec2.us-east-1.amazonaws.com"),
        RuntimeError(
            "Failed to retrieve AWS regions. Please ensure that the `ec2:DescribeRegions`"
        ),
    ],
    ids=lambda problem: type(problem).__name__,
)
def test_an_aws_that_does_not_tell_the_regions_of_an_account_is_no_bug_of_ours(
    problem: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SkyPilot asks for them once, when somebody first wants its prices."""

    def look(*_: object) -> Any:
        raise problem

    monkeypatch.setattr(prices, "_look_everywhere", look)
    with pytest.raises(EnvironmentFailure, match=r"DescribeRegions|endpoint") as told:
        survey([Place.parse("aws")], Machine(), market=Market.SPOT)
    assert told.value.hint
