"""Whether the packages of the extra are there, in a version that this was made for."""

from __future__ import annotations

import importlib.metadata

from packaging.version import Version

from spotguard.errors import MissingExtra

OLDEST = "5.3"
"""From here on the Trainer's loop consists of the parts that `surviving_trainer` stands between."""


def check_installed() -> None:
    """Return if transformers and accelerate can be used.

    Raises:
        MissingExtra: one is not installed, or is too old.
    """
    for package, oldest in (("transformers", OLDEST), ("accelerate", "1.1")):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = ""
        if not found or Version(found) < Version(oldest):
            problem = f"{package} {found} is too old" if found else f"{package} is not installed"
            raise MissingExtra(
                f"spotguard.integrations.transformers needs {package} {oldest} or later: {problem}",
                hint="pip install 'spotguard[transformers]'",
            )
