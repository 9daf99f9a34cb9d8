"""The site that `make docs` builds: whole, without network, and the same pages as on GitHub."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.same_everywhere]

ROOT = Path(__file__).parents[2]
GITHUB = "https://github.com/spotguard/spotguard/"
NOWHERE = "http://127.0.0.1:9"
LOADED_BY_ITSELF = {"script": "src", "img": "src", "iframe": "src"}
_NO_WORDS = re.compile(r'<code>.*?</code>|<span class="doc-section-title">.*?</span>', re.DOTALL)
_ARTICLE = re.compile(r"<article.*?</article>", re.DOTALL)


class Html(HTMLParser):
    """What a page links to, what it loads, and the anchors that it has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take note of one tag."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") in ("stylesheet", "icon"):
            self.loaded.append(given["href"])
        if tag in LOADED_BY_ITSELF and given.get(LOADED_BY_ITSELF[tag]):
            self.loaded.append(given[LOADED_BY_ITSELF[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site, built strictly where nothing on the network can be reached."""
    folder = tmp_path_factory.mktemp("site")
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), NOWHERE)
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, **proxies, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Html]:
    """Return each page of the site; the one for what is missing has links of its own kind."""
    found = {path: Html(path.read_text()) for path in sorted(site.rglob("*.html"))}
    del found[site / "404.html"]
    assert len(found) > 25
    return found


def hooks() -> Any:
    """Return the module that tells mkdocs which pages come from outside of docs/."""
    spec = importlib.util.spec_from_file_location(
        "site_hooks", ROOT / "docs" / "reference" / "site_hooks.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_link_leads_somewhere(pages: dict[Path, Html]) -> None:
    """Pages, anchors and, at the repository's address, files: all are there."""
    broken = [
        f"{page.name}: {link}"
        for page, html in pages.items()
        for link in html.links
        if not _leads_somewhere(page, link, pages)
    ]
    assert not broken


def _leads_somewhere(page: Path, link: str, pages: dict[Path, Html]) -> bool:
    if link.startswith(GITHUB):
        kind, _, path = link.removeprefix(GITHUB).partition("/main/")
        return kind not in ("blob", "tree", "edit") or (ROOT / urlsplit(path).path).exists()
    url = urlsplit(link)
    if url.scheme:
        return True
    target = (page.parent / unquote(url.path)).resolve() if url.path else page
    target = target / "index.html" if target.is_dir() else target
    if not url.fragment or target not in pages:
        return target.exists()
    return unquote(url.fragment) in pages[target].anchors


def test_a_page_loads_nothing_from_elsewhere(pages: dict[Path, Html]) -> None:
    """Scripts, styles, fonts and pictures are the site's own: it is read without network."""
    foreign = {link for html in pages.values() for link in html.loaded if urlsplit(link).scheme}
    assert not foreign


def test_pages_say_the_same_on_github_and_in_the_site(pages: dict[Path, Html], site: Path) -> None:
    """Two readers of Markdown differ in lists and tables: each page has as many in both."""
    github, path_of = MarkdownIt("commonmark").enable("table"), hooks().path_of
    for page in pages:
        uri = page.relative_to(site).with_suffix(".md").as_posix()
        if uri.startswith("reference/"):
            continue  # what comes from docstrings is not on GitHub
        there = github.render((ROOT / path_of(uri)).read_text())
        found = _ARTICLE.search(page.read_text())
        assert found is not None
        for tag in ("li", "ol", "table", "td", "pre", "h2", "h3", "a href", "strong", "em"):
            assert (uri, tag, _count(tag, found[0])) == (uri, tag, _count(tag, there))


def _count(tag: str, html: str) -> int:
    return len(re.findall(rf"<{tag}\b", html))


def _public_names() -> Iterator[str]:
    for module in ("spotguard.api", "spotguard.runtime", "spotguard.testing"):
        for name in importlib.import_module(module).__all__:
            yield f"{module}.{name}"


def test_every_public_name_has_its_place_in_the_reference(pages: dict[Path, Html]) -> None:
    """What a script or a test may import is explained."""
    anchors = {anchor for html in pages.values() for anchor in html.anchors}
    assert set(_public_names()) <= anchors


def test_docstrings_become_what_they_mean(site: Path) -> None:
    """Arguments and errors become lists, and examples code: none is left in a paragraph."""
    reference = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    paragraphs = re.findall(r"<p>(.*?)</p>", reference, re.DOTALL)
    assert len(paragraphs) > 200
    left = "".join(_NO_WORDS.sub("", paragraph) for paragraph in paragraphs)
    assert re.findall(r".*(?:Args:|Raises:|Returns:| = ).*", left) == []
