"""`doctor` and SkyPilot's clouds: what is asked, printed, and which exit code follows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.doctor import checks as doctor
from spotguard.control.doctor import clouds as doctor_clouds
from spotguard.control.doctor import store as doctor_store
from spotguard.launch.skypilot.ask_in_subprocess import ask
from tests.control.doctor.test_orphans import FakeBooks
from tests.launch.fake_package import plant_sky

if TYPE_CHECKING:
    from tests.cli.conftest import Cli
    from tests.cli.fake_control import FakeControl

pytestmark = pytest.mark.usefixtures("quick")
REASON = "    Reason [compute]: AWS credentials AKIAIOSFODNN7EXAMPLE are not set. Run this.\n"


@pytest.fixture
def quick(control: FakeControl, monkeypatch: pytest.MonkeyPatch) -> None:
    """What else the doctor looks at has tests of its own."""
    monkeypatch.setattr(doctor_store, "SPEED_BYTES", 1_000_000)
    monkeypatch.setattr(doctor, "check_torch", doctor.check_python)


def checks(out: str) -> dict[str, tuple[str, str, str]]:
    """Return what the document says of clouds."""
    body = json.loads(out)
    return {
        check["name"]: (check["status"], check["detail"], check["hint"])
        for check in body["checks"]
        if check["name"].startswith("cloud")
    }


def test_what_is_enabled_is_named_and_what_is_not_has_its_reason(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those on which jobs shall run must be; the reason is one sentence, and holds no secret."""
    plant_sky(monkeypatch, tmp_path, enabled=["gcp"], checks={"aws": REASON})
    Path("spotguard.toml").write_text('infra = "gcp,aws"\non_demand_infra = "azure/eastus"\n')
    said = cli("doctor", "--json")
    assert said.code == 3
    assert checks(said.out) == {
        "clouds": ("ok", "enabled at SkyPilot: azure, gcp", ""),
        "cloud aws": (
            "failed",
            "is named, and SkyPilot has not enabled it: AWS credentials *** are not set.",
            "aws configure, then: sky check aws",
        ),
    }
    clouds = json.loads(said.out)["clouds"]
    assert clouds["named"] == ["gcp", "aws", "azure"]
    assert clouds["disabled"] == {"aws": "AWS credentials *** are not set."}
    assert "AKIA" not in said.out + said.err

    table = cli("doctor", "--infra", "gcp/us-central1")
    assert table.code == 0
    assert "clouds" in table.out
    assert max(map(len, table.out.splitlines())) <= 80


def test_nobody_is_asked_where_no_cloud_is_named_and_skypilot_was_never_used(cli: Cli) -> None:
    """The question would start its API server, and tell nothing."""
    said = cli("doctor", "--json")
    assert said.code == 0
    assert checks(said.out) == {}
    assert json.loads(said.out)["clouds"]["asked"] is False


def test_a_place_that_is_none_is_refused(cli: Cli) -> None:
    """As for `up`: usage."""
    said = cli("doctor", "--infra", "mars")
    assert said.code == 2
    assert "infra: given 'mars'" in said.err


@pytest.mark.parametrize(
    ("source", "status", "words", "code"),
    [
        ("raise ImportError", "failed", "SkyPilot is not installed", 3),
        ("raise RuntimeError('half an install')", "failed", "half an install", 3),
        ("import os; os._exit(7)", "failed", "exit code 7", 3),
        ("import time; time.sleep(3600)", "noted", "SkyPilot has not answered within", 0),
    ],
)
def test_a_skypilot_that_is_absent_broken_or_silent_is_a_finding(
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    source: str,
    status: str,
    words: str,
    code: int,
) -> None:
    """Bounded in time, and all else is told; its books are not opened, which would hang as well."""
    plant_sky(monkeypatch, tmp_path, source=source)
    patience_s = 1.0 if "sleep" in source else 60.0

    def impatient(question: str, *about: str) -> Any:
        return ask(question, *about, patience_s=patience_s)

    def hang() -> None:
        raise AssertionError("asked a SkyPilot that does not work")

    books = FakeBooks()
    monkeypatch.setattr(books, "ours", hang)
    monkeypatch.setattr("spotguard.api.doctor.skypilot_books", lambda: books)
    monkeypatch.setattr(doctor_clouds, "ask", impatient)
    said = cli("doctor", "--infra", "aws", "--json")
    assert said.code == code
    found_status, detail, hint = checks(said.out)["clouds"]
    assert found_status == status
    assert words in detail
    assert hint
