"""What `mkdocs` is told beside mkdocs.yml: pages from outside docs/, and links that work there.

On GitHub a page links to another file of the repository by its path. The site has only pages, so
such a link becomes one to a page or picture if the file is one, else one to the file on GitHub. A
link to nothing is left as it is, for mkdocs to complain about.
"""

from __future__ import annotations

import os.path
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
FROM_OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    "infra/README.md": "infra.md",
    "infra/iam/README.md": "iam.md",
    "infra/lab/README.md": "lab.md",
}
"""Pages that stay where a reader of the repository looks for them, and what the site calls them."""
_FENCE_OR_LINK = re.compile(r"^ *```.*?^ *```|\]\(([^)\s]+)\)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside."""
    for path, uri in FROM_OUTSIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links of the site; code stays as it is."""
    home = path_of(page.file.src_uri)

    def in_site(found: re.Match[str]) -> str:
        link = found[1]
        if link is None or link.startswith("#") or re.match(r"[a-z]+:", link):
            return found[0]
        return f"]({_in_site(link, home, page.file.src_uri, str(config.repo_url))})"

    return _FENCE_OR_LINK.sub(in_site, markdown)


def path_of(uri: str) -> str:
    """Return the file of the repository that a page of the site is made of."""
    outside = {name: path for path, name in FROM_OUTSIDE.items()}
    return outside.get(uri, f"docs/{uri}")


def _in_site(link: str, home: str, uri: str, repository: str) -> str:
    name, _, anchor = link.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(home), name))
    target = FROM_OUTSIDE.get(path)
    if target is None and path.startswith("docs/") and path.endswith((".md", ".png")):
        target = path.removeprefix("docs/")
    if target is not None:
        name = os.path.relpath(target, posixpath.dirname(uri) or ".")
    elif (ROOT / path).exists():
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        name = f"{repository.rstrip('/')}/{kind}/main/{path}"
    return f"{name}#{anchor}" if anchor else name
