"""The one way to SkyPilot: importing it takes seconds and 150 MB, so only when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.errors import MissingExtra

if TYPE_CHECKING:
    from types import ModuleType


def load_sky() -> ModuleType:
    """Return SkyPilot's package.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        import sky
        import sky.catalog
        import sky.catalog.common
    except ImportError as problem:
        raise MissingExtra(
            "SkyPilot is not installed, and every place but local needs it",
            hint="pip install 'spotguard[sky]'",
        ) from problem
    module: ModuleType = sky
    return module
