"""Which clouds SkyPilot has enabled, and why it has not what a job names: asked by the doctor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spotguard.errors import EnvironmentFailure, MissingExtra
from spotguard.launch.base import Unreachable
from spotguard.launch.skypilot.ask_in_subprocess import ask
from spotguard.launch.skypilot.import_sky import in_use
from spotguard.shared.json_documents import HIDDEN
from spotguard.spec.infra import LOCAL

if TYPE_CHECKING:
    from collections.abc import Sequence

_WAYS = {
    "aws": "aws configure",
    "gcp": "gcloud auth application-default login",
    "azure": "az login",
    "kubernetes": "see that kubectl reaches the context",
    "slurm": "see that the login node in ~/.slurm/config answers",
}


@dataclass(frozen=True, kw_only=True)
class Clouds:
    """What SkyPilot says of clouds."""

    asked: bool = False
    """False where no cloud is named and SkyPilot was never used."""
    named: tuple[str, ...] = ()
    """Those on which a job of the settings here would run."""
    enabled: tuple[str, ...] = ()
    """Those on which SkyPilot would start nodes."""
    disabled: dict[str, str] = field(default_factory=dict)
    """Of those that are named: why it would start no nodes there."""
    problem: str = ""
    """Why it could not be asked."""
    hint: str = field(default="", metadata=HIDDEN)
    is_silent: bool = field(default=False, metadata=HIDDEN)
    """It could not be asked because it does not answer, which may be over in a minute."""

    def way_out(self, cloud: str) -> str:
        """Return what enables a cloud."""
        return f"{_WAYS.get(cloud, 'set it up')}, then: sky check {cloud}"


def clouds_of(places: Sequence[str]) -> tuple[str, ...]:
    """Return the clouds of these places, as in `infra`, each once; local nodes have none."""
    each = (place.partition("/")[0] for infra in places for place in infra.split(","))
    return tuple(dict.fromkeys(cloud for cloud in each if cloud != LOCAL))


def look_at_clouds(places: Sequence[str]) -> Clouds:
    """Return what SkyPilot says, unless nobody names a cloud and it was never used here.

    Blocks for seconds, and for a minute and a half where SkyPilot is silent.
    """
    named = clouds_of(places)
    if not named and not in_use():
        return Clouds()
    try:
        said = ask("clouds", *named)
    except EnvironmentFailure as problem:
        return Clouds(
            asked=True,
            named=named,
            problem=problem.message,
            hint=problem.hint if isinstance(problem, MissingExtra) else "try: sky check",
            is_silent=isinstance(problem, Unreachable),
        )
    enabled = tuple(said["enabled"])
    return Clouds(asked=True, named=named, enabled=enabled, disabled=said["disabled"])
