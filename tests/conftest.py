"""What holds for every test."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

# Set before anything imports torch. Test workers share the cores: with torch's own threads on top
# of them, small operations wait for each other and the suite takes four times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from spotguard.events import masking
from tests.guards import skips

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# How long an example takes says how busy the machine is.
settings.register_profile("spotguard", deadline=None)
settings.load_profile("spotguard")


@pytest.fixture(scope="session", autouse=True)
def _vendors_data_read_once() -> Iterator[None]:
    """Keep what botocore reads: each new client unpacks its service's megabyte anew."""
    if find_spec("botocore") is None:
        yield
        return
    from botocore.loaders import JSONFileLoader

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", _once_each(JSONFileLoader.load_file))
        yield


@pytest.fixture(autouse=True)
def _no_secrets_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what other tests' jobs had in `env`: a process masks all that it has ever known."""
    monkeypatch.setattr(masking, "KNOWN", masking.KnownSecrets())


def _once_each(load: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    kept: dict[str, Any] = {}

    def load_once(loader: Any, path: str) -> Any:
        if path not in kept:
            kept[path] = load(loader, path)
        return kept[path]

    return load_once


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what is missing here: a suite that passes must not hide what it left out."""
    line = skips.line_of(terminalreporter.stats.get("skipped", ()))
    if line:
        terminalreporter.write_line(line)
