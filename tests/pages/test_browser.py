"""The pages in a real Chromium: they draw, follow a run live, and can be read by all."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control import api
from spotguard.pages.html import report_html
from spotguard.pages.run_page import run_page
from tests.pages.hostile_text import SCRIPT, hostile_run

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
AXE = ROOT / ".browser-tests" / "node_modules" / "axe-core" / "axe.min.js"
ARTEFACTS = ROOT / ".browser-tests" / "screenshots"
_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_PATIENCE_MS = 90_000
_PATIENCE_WITH_A_RUN_MS = 300_000
"""A busy machine needs minutes from `up` to the twelfth step of three processes."""
JOB = """
import time
import torch
import spotguard.runtime as spotguard

run = spotguard.init(save_every="1s")
data = torch.utils.data.TensorDataset(torch.arange(40_000.0).reshape(-1, 1))
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
loader = run.loader(data, global_batch_size=4, micro_batch_size=2)
run.track(model=model, optimizer=optimizer)
for step in run.steps(loader, total=5_000):
    for (x,) in step:
        step.backward(model(x).mean())
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium of Debian's, whose data is new and deleted again."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is missing")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is missing (`make browser`)"
    )
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=chromium, args=list(_FLAGS))
        yield launched
        launched.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own."""
    monkeypatch.setenv("SPOTGUARD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def served(home: Path) -> Iterator[str]:
    """The address, with its token, of a dashboard of that home in a process of its own."""
    home.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "spotguard.cli", "dashboard", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})
    assert process.stdout is not None
    try:
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address is not None
        yield address[0]
    finally:
        process.terminate()
        code = process.wait(30)
        process.stdout.close()
    assert code == 0


def _page(browser: Any, **options: Any) -> tuple[Any, list[str]]:
    """Return a page of a new visitor, and what its console will have said."""
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(_PATIENCE_MS)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda problem: said.append(str(problem)))
    return page, said


def _keep(page: Any, name: str) -> None:
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(ARTEFACTS / f"{name}.png"), full_page=True)


def _axe(page: Any) -> list[str]:
    """Return what axe finds that is serious; `page` must allow our script, by its own policy."""
    if not AXE.exists():
        pytest.skip("axe-core is missing (`make browser`, npm)")
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run()")["violations"]
    return [
        f"{each['id']}: {each['nodes'][0]['html'][:200]}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_can_be_read_by_all(browser: Any, home: Path, tmp_path: Path, scheme: str) -> None:
    """From a disk, on desk and phone: it draws, asks nobody, and axe finds nothing serious."""
    hostile_run(home)
    path = tmp_path / "report.html"
    path.write_text(report_html(run_page(api.report("job-1"))))
    for name, size in (("desk", (1280, 900)), ("phone", (390, 800))):
        viewport = {"width": size[0], "height": size[1]}
        page, said = _page(browser, color_scheme=scheme, viewport=viewport)
        asked: list[str] = []
        page.on("request", lambda request, asked=asked: asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("#money canvas")
        assert page.evaluate("document.documentElement.dataset.theme") == scheme
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
        assert said == []
        _keep(page, f"report-{name}-{scheme}")
        assert _axe(page) == []
        page.context.close()


def test_what_a_job_wrote_is_text(browser: Any, home: Path, served: str) -> None:
    """Markup in warnings, reasons and places is read, not run; the policy has nothing to refuse."""
    hostile_run(home)
    page, said = _page(browser)
    page.goto(served)
    page.get_by_role("link", name="job-1").click()
    page.wait_for_selector(".warning")
    assert SCRIPT in page.locator(".warning").first.inner_text()
    assert page.locator("#attempts").inner_text().count(SCRIPT) == 1
    assert "owned" not in page.title()
    assert page.locator("img").count() == 0
    assert said == []
    assert page.evaluate("location.search") == ""
    assert _axe(page) == []
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_dashboard_can_be_read_by_all(
    browser: Any, home: Path, served: str, scheme: str
) -> None:
    """The list of runs, on desk and phone: nothing is cut, and axe finds nothing serious."""
    hostile_run(home)
    for name, size in (("desk", (1280, 900)), ("phone", (390, 800))):
        viewport = {"width": size[0], "height": size[1]}
        page, said = _page(browser, color_scheme=scheme, viewport=viewport, bypass_csp=True)
        page.goto(served)
        page.get_by_role("link", name="job-1").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert said == []
        _keep(page, f"dashboard-{name}-{scheme}")
        assert _axe(page) == []
        page.context.close()


def test_a_report_prints(browser: Any, home: Path, tmp_path: Path) -> None:
    """In light colours, with all that is folded opened, as a whole document."""
    hostile_run(home)
    path = tmp_path / "report.html"
    path.write_text(report_html(run_page(api.report("job-1"))))
    page, said = _page(browser, color_scheme="dark")
    page.goto(path.as_uri())
    page.wait_for_selector("#money canvas")
    assert page.locator("details:not([open])").count() > 0
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    printed = page.pdf(path=str(ARTEFACTS / "report.pdf"), format="A4")
    assert printed.startswith(b"%PDF-")
    assert page.locator("details:not([open])").count() == 0
    assert said == []
    page.context.close()


def test_a_page_that_nobody_sees_lets_go_of_its_connection(
    browser: Any, home: Path, served: str
) -> None:
    """A browser has six to a server, so that a seventh page would never load; seen, it goes on."""
    hostile_run(home)
    page, _ = _page(browser)
    page.goto(served)
    page.locator(".live.on").wait_for()
    for state, words in (("hidden", "paused"), ("visible", "live")):
        page.evaluate(
            "state => { Object.defineProperty(document, 'visibilityState',"
            " { value: state, configurable: true });"
            " document.dispatchEvent(new Event('visibilitychange')); }",
            state,
        )
        page.locator(".live", has_text=words).wait_for()
    page.context.close()


@pytest.mark.timeout(900)
def test_a_notice_is_seen_live_and_a_stop_is_confirmed(
    browser: Any, home: Path, served: str, tmp_path: Path
) -> None:
    """Nobody reloads: a run appears, trains, loses a node, goes on, and a button stops it."""
    script = tmp_path / "train.py"
    script.write_text(JOB)
    page, said = _page(browser, viewport={"width": 1280, "height": 900})
    page.set_default_timeout(_PATIENCE_WITH_A_RUN_MS)
    page.goto(served)
    page.get_by_text("no runs yet").wait_for()
    words = ("up", str(script), "--nodes", "2", "--yes", "--detach", "--speed-up", "20")
    command = [sys.executable, "-m", "spotguard.cli", *words]
    interrupt = ("--interrupt", "node=1@step=12:notice")
    subprocess.run([*command, *interrupt], check=True, capture_output=True, timeout=120)
    page.locator("table.runs a").first.click()
    page.get_by_text("running", exact=True).wait_for()
    page.locator("#history").get_by_text("notice: node 1 will be taken").wait_for()
    page.locator("#attempts").get_by_text("preempted with notice").wait_for()
    page.get_by_text("trains on 2 nodes").wait_for()
    page.wait_for_selector("#series-loss canvas")
    _keep(page, "dashboard-interrupted")
    page.click("#ask-stop")
    page.get_by_role("button", name="Cancel").click()
    page.locator("dialog").wait_for(state="detached")
    [run_id] = [run.run_id for run in api.list_runs()]
    assert not api.view(run_id).state.settled
    page.click("#ask-stop")
    page.click("#confirm")
    page.locator("#state", has_text="stopped").wait_for()
    page.wait_for_selector("#ask-resume")
    _keep(page, "dashboard-stopped")
    assert said == []
    _settled(run_id)
    page.context.close()


def _settled(run_id: str) -> None:
    """Wait until the controller has left, too: nothing of the test may live on."""
    from spotguard.control.run_folder import folder_of

    until = time.monotonic() + 60
    while folder_of(run_id).controller_pid() is not None:
        assert time.monotonic() < until
        time.sleep(0.1)
