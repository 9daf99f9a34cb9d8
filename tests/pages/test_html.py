"""Pages hold what others wrote as data, load nothing, and run nothing but their own script."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from spotguard.cli.main import main
from spotguard.control import api
from spotguard.pages.html import as_json, live_html, policy, report_html, static
from spotguard.pages.layout import Card, WebPage
from spotguard.pages.run_page import run_page
from spotguard.pages.runs_page import runs_page
from tests.pages.hostile_text import MARK, SCRIPT, hostile_run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a run that tries things."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    hostile_run(tmp_path / "home")
    return tmp_path / "home"


def _data(html: str) -> str:
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    return str(data)


@pytest.mark.usefixtures("home")
def test_what_a_job_wrote_ends_no_element() -> None:
    """A script in a warning, a reason or a place is a text, and comes out as it went in."""
    page = run_page(api.report("job-1"))
    html = report_html(page)
    assert html.count("<script") == 3  # the data, the plot's, the page's
    assert html.count("</script>") == 3
    assert "onerror" not in html.replace(_data(html), "")
    assert "<" not in _data(html)
    assert json.loads(_data(html)) == json.loads(as_json(page))
    assert SCRIPT + MARK in json.loads(_data(html))["warnings"][0]


@pytest.mark.usefixtures("home")
def test_a_title_is_text_too() -> None:
    """The name of a run stands in the head, where no data element protects it."""
    html = live_html(WebPage(kind="run", title=SCRIPT))
    assert html.count("<script") == 3
    assert "&lt;/script&gt;" in html.split("</title>")[0]


@pytest.mark.usefixtures("home")
def test_a_report_loads_nothing() -> None:
    """It is whole in itself: no address in it is ever asked."""
    html = report_html(run_page(api.report("job-1")))
    plain = html.replace(_data(html), "")
    assert not re.findall(r'(?:src|href)="(?!data:,)', plain)
    assert "@import" not in plain
    assert "url(" not in plain
    assert "connect-src 'none'" in policy(connects=False)
    assert len(html.encode()) < 200_000


def test_the_policy_names_what_runs_and_nothing_else() -> None:
    """Without an exception for whatever stands in the page."""
    for connects in (True, False):
        told = dict(part.split(" ", 1) for part in policy(connects=connects).split("; "))
        assert told["default-src"] == "'none'"
        assert told["script-src"].count("sha256-") == 2
        assert told["style-src"].count("sha256-") == 1
        assert "unsafe" not in str(told)
        assert "*" not in str(told)


def test_the_pages_script_makes_no_markup_of_text() -> None:
    """No way leads from a text to an element."""
    script = static("page.js")
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "srcdoc",
    ):
        assert way not in script


def test_what_is_not_finite_is_unknown() -> None:
    """NaN is no JSON: a browser would show nothing at all."""
    page = WebPage(kind="runs", title="t", cards=(Card(label="a", value="b", share=float("nan")),))
    assert json.loads(as_json(page))["cards"][0]["share"] is None


@pytest.mark.usefixtures("home")
def test_played_money_says_so_on_each_page(capsys: pytest.CaptureFixture[str]) -> None:
    """Banner, cards, columns, the list of runs, and the terminal."""
    page = as_json(run_page(api.report("job-1")))
    assert "demo prices" in page
    assert "cost (demo)" in page
    assert "(demo)" in as_json(runs_page(api.list_runs()))
    assert main(["runs"]) == 0
    assert "demo" in capsys.readouterr().out
    assert main(["status"]) == 0
    assert "demo prices" in capsys.readouterr().out


def test_report_writes_whole_files_or_none(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names what it wrote; a folder that is not there is said in one sentence."""
    assert main(["report"]) == 0
    assert "job-1.html" in capsys.readouterr().out
    assert (tmp_path / "job-1.html").read_text().startswith("<!doctype html>")
    assert main(["report", "job-1", "--html", str(tmp_path / "no" / "o.html")]) == 2
    assert "--html: " in capsys.readouterr().err
    assert main(["report", "--html", str(home)]) == 2
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".new")]
    assert main(["report", "--json", "--html", "o.html"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["run"]["run_id"] == "job-1"
    assert "o.html" in said.err
