"""What of a job is in no run store, and goes from machine to machine beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spotguard.shared.paths import expanded
from spotguard.spec.model import JobSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_PATHS = ("script", "workdir")
"""Settings that may be paths of the machine where `up` was typed."""


@dataclass(frozen=True, kw_only=True)
class Private:
    """Values of variables, addresses, and where the job's folders lie on this machine."""

    env: Mapping[str, str] = field(default_factory=dict)
    notify: tuple[str, ...] = ()
    """The addresses that the run tells of itself."""
    folders: Mapping[str, str] = field(default_factory=dict)
    """By their path where `up` was typed."""

    def job(self, public: Mapping[str, Any]) -> JobSpec:
        """Return the whole job as it is here, from what `JobSpec.public_json` wrote.

        Raises:
            SpecError: it is none, or a variable has no value here.
        """
        public = {name: each for name, each in public.items() if name != "env"}
        moved = {name: self._here(public[name]) for name in _PATHS if name in public}
        if "template" in public:
            moved["template"] = self._itself_here(public["template"])
        node = public.get("node")
        if self.folders and isinstance(node, dict):
            moved["node"] = {
                **node,
                "requirements": self._here(node.get("requirements")),
                "file_mounts": {
                    place: self._itself_here(source)
                    for place, source in (node.get("file_mounts") or {}).items()
                },
            }
        body = {**public, **moved, "notify": list(self.notify)}
        return JobSpec.from_json(body, environ=self.env)

    def _itself_here(self, path: object) -> object:
        """Return where something lies here that was carried by itself.

        Not what is seen of it in another folder: what git ignores there was not carried with it.
        """
        known = self.folders.get(path) if isinstance(path, str) else None
        return self._here(path) if known is None else known

    def _here(self, path: object) -> object:
        """Return where something lies here that lay at `path`; itself if it was not carried."""
        if not isinstance(path, str):
            return path
        for before, now in self.folders.items():
            if path == before or path.startswith(f"{before}/"):
                return now + path[len(before) :]
        return path


def read_private(path: Path) -> Private:
    """Return what lies in a file that a move of the controller wrote."""
    body = json.loads(path.read_text())
    return Private(
        env=body["env"],
        notify=tuple(body["notify"]),
        folders={before: str(expanded(now)) for before, now in body["folders"].items()},
    )
