from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pytest

from spotguard.spec.sources import Resolved, resolve

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SCRIPT = "import spotguard.runtime as spotguard\nrun = spotguard.init()\n"


class Resolve(Protocol):
    """Resolve `job.py` in the test's own folder."""

    def __call__(
        self,
        flags: Mapping[str, object] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        block: str = "",
        project: str = "",
        user: str = "",
    ) -> Resolved:
        """Return what the given sources resolve to."""
        ...


@pytest.fixture
def resolve_job(tmp_path: Path) -> Resolve:
    """Resolve a minimal script, with each source of settings under the test's control."""

    def run(
        flags: Mapping[str, object] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        block: str = "",
        project: str = "",
        user: str = "",
    ) -> Resolved:
        lines = "".join(f"# {line}\n" for line in block.splitlines())
        head = f"# /// script\n{lines}# ///\n" if block else ""
        (tmp_path / "job.py").write_text(head + SCRIPT)
        (tmp_path / "spotguard.toml").write_text(project)
        (tmp_path / "home").mkdir(exist_ok=True)
        (tmp_path / "home" / "config.toml").write_text(user)
        environ = {"SPOTGUARD_HOME": str(tmp_path / "home"), **(environ or {})}
        return resolve("job.py", flags=flags or {}, environ=environ, cwd=tmp_path)

    return run
