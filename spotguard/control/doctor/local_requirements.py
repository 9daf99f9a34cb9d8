"""What a script says that it needs (PEP 723) and local nodes lack: they install nothing."""

from __future__ import annotations

import platform
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from spotguard.launch.requirements_check import missing
from spotguard.spec.infra import LOCAL
from spotguard.spec.script import read_script
from spotguard.spec.setting_layers import script_needs

if TYPE_CHECKING:
    from spotguard.spec.model import JobSpec


@dataclass(frozen=True, kw_only=True)
class Lack:
    """What local nodes would miss."""

    requirements: tuple[str, ...] = ()
    python: str | None = None
    """The versions of Python that the script wants, if this is none of them."""

    def words(self) -> list[str]:
        """Return a sentence for each kind."""
        told = []
        if self.requirements:
            told.append(
                "local nodes install nothing, and this Python lacks: "
                f"{', '.join(self.requirements)}\nhint: pip install {shlex.join(self.requirements)}"
            )
        if self.python is not None:
            told.append(
                f"the script wants Python {self.python}, and local nodes have "
                f"{platform.python_version()}"
            )
        return told


def lack_of(spec: JobSpec) -> Lack:
    """Return what the job's script needs and local nodes do not have; elsewhere pip installs it.

    Raises:
        SpecError: the script cannot be read, or what it says of its needs makes no sense.
    """
    if spec.infra != LOCAL:
        return Lack()
    script = read_script(Path(spec.script))
    needs = script_needs(script.path, script.source)
    other = needs.python is not None and not _fits(needs.python)
    return Lack(requirements=missing(needs.dependencies), python=needs.python if other else None)


def _fits(versions: str) -> bool:
    try:
        return SpecifierSet(versions).contains(platform.python_version(), prereleases=True)
    except InvalidSpecifier:
        return False
