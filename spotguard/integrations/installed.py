"""Whether the packages of an extra are there, in a version that its integration was made for."""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version

from spotguard.errors import MissingExtra


def check_installed(extra: str, **oldest: str) -> None:
    """Return if these packages can be used, each in this version or a later one.

    Raises:
        MissingExtra: one is not installed, or is too old.
    """
    for package, version in oldest.items():
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = ""
        if not found or Version(found) < Version(version):
            problem = f"{package} {found} is too old" if found else f"{package} is not installed"
            raise MissingExtra(
                f"spotguard.integrations.{extra} needs {package} {version} or later: {problem}",
                hint=f"pip install 'spotguard[{extra}]'",
            )
