"""What of a smoke nodes will not have: files that are not copied, packages that nobody names."""

from __future__ import annotations

import ast
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from spotguard.control.drill.smoke.verdict import Stopped
from spotguard.control.journal.stored.code import in_folder
from spotguard.launch.requirements_check import installed_with
from spotguard.launch.workdir.copy_rules import way_out
from spotguard.launch.workdir.left_behind import left_above
from spotguard.launch.workdir.requirements_file import plain_requirements
from spotguard.launch.workdir.snapshot import ALL, copy_for_trial
from spotguard.spec.script import read_script
from spotguard.spec.setting_layers import script_needs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from spotguard.control.drill.smoke.places import Code
    from spotguard.control.drill.smoke.process import Facts
    from spotguard.launch.workdir.copy_rules import NotCopied
    from spotguard.launch.workdir.snapshot import Snapshot
    from spotguard.spec.model import JobSpec

_QUOTED = re.compile(r"'([^'\n]+)'")
_FOLDER = "workdir"
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_ANYWAY = "--no-smoke launches it without a look"
_SOURCES = ("", "src/", "lib/")


class NodesView:
    """The job as its nodes will have it: a copy of the folder, made as SkyPilot makes it."""

    def __init__(self, spec: JobSpec, snapshot: Snapshot | None, room: Path) -> None:
        """Copy the folder into `room`, unless the nodes are this machine's."""
        self._own = spec
        self._snapshot = snapshot if snapshot is not None and snapshot.kind == ALL else None
        self.spec = spec
        if self._snapshot is not None:
            copy_for_trial(self._snapshot, room / _FOLDER)
            self.spec = in_folder(spec, room / _FOLDER)

    def lacks(self, facts: Facts, code: Code) -> Stopped | None:
        """Return what a process failed for that is here, and not on its nodes; None if nothing."""
        told, snapshot = facts.told, self._snapshot
        if told is None or snapshot is None:
            return None
        left = {each.path: each for each in snapshot.left}
        where = code.told(code.innermost(told.frames))
        for path in self._paths_in(told.kind, told.message):
            if (found := left_above(left, path)) is not None and self._is_here(found):
                return Stopped(
                    what=f"{where}: {found.path} is not copied to the nodes, by line {found.line} "
                    f"of {found.rules}",
                    hint=f"{way_out([found])}; {_ANYWAY}",
                )
            for link in snapshot.leads_out:
                if f"{path}/".startswith(f"{link}/"):
                    leads = (Path(self._own.workdir) / link).readlink()
                    return Stopped(
                        what=f"{where}: {link} is a link that leads out of the folder, to {leads}: "
                        "nodes have nothing there",
                        hint=f"copy what it leads to, or bring it by --file-mount; {_ANYWAY}",
                    )
        return None

    def in_words(self, stopped: Stopped) -> str:
        """Return what is wrong with the paths of the user's own folder."""
        return stopped.what.replace(self.spec.workdir, self._own.workdir)

    def unnamed(self, facts: Facts, code: Code, *, ready_made: bool) -> Stopped | None:
        """Return a package that was imported and that no node will have; None if all are named."""
        if self._snapshot is None or ready_made or not facts.modules:
            return None
        given = installed_with([*self._asked(), "spotguard"])
        if given is None:
            return None
        by_module = metadata.packages_distributions()
        for name, file, line in self._imported(facts.modules):
            at = Path(facts.modules[name])
            if at.is_relative_to(self.spec.workdir) or name in sys.stdlib_module_names:
                continue
            owners = {_plain_name(each) for each in by_module.get(name, ())}
            if owners & given or name == "spotguard":
                continue
            place = code.told_at(file, line)
            if _INSTALLED.isdisjoint(at.parts):
                if any(at.is_relative_to(path) for path in self._installed_from()):
                    continue
                return Stopped(
                    what=f"{place}: {name} comes from {at.parent}, which is not where nodes look",
                    hint="have it beside the script, or installed there: a line `-e ./FOLDER` in "
                    f"node.requirements, or --setup 'pip install ./FOLDER'; {_ANYWAY}",
                )
            if not owners:
                continue
            package = sorted(owners)[0]
            return Stopped(
                what=f"{place}: {name} is installed here, and nobody names it for the nodes",
                hint=f"name {package} in the script's `# /// script` dependencies, or in "
                f"node.requirements; {_ANYWAY}",
            )
        return None

    def _is_here(self, left: NotCopied) -> bool:
        return os.path.lexists(Path(self._own.workdir) / left.path)

    def _paths_in(self, kind: str, message: str) -> Iterator[str]:
        """Yield the paths below the folder that an error may speak of."""
        top = Path(self.spec.workdir)
        script = Path(self.spec.script).parent.relative_to(top).as_posix()
        if kind in ("ModuleNotFoundError", "ImportError"):
            for name in _QUOTED.findall(message):
                parts = name.split(".")
                for length in range(len(parts), 0, -1):
                    inner = "/".join(parts[:length])
                    for base in (f"{script}/" if script != "." else "", *_SOURCES):
                        yield from (f"{base}{inner}.py", f"{base}{inner}/__init__.py")
            return
        for text in _QUOTED.findall(message):
            seen = os.path.normpath(top / text)
            if Path(seen).is_relative_to(top):
                yield Path(seen).relative_to(top).as_posix()

    def _asked(self) -> list[str]:
        if self.spec.node.requirements is not None:
            return list(plain_requirements(Path(self.spec.node.requirements)).lines)
        script = read_script(Path(self.spec.script))
        return list(script_needs(script.path, script.source).dependencies)

    def _installed_from(self) -> list[Path]:
        """Return the folders of the user's that nodes install packages from."""
        if self.spec.node.requirements is None:
            return []
        found = plain_requirements(Path(self.spec.node.requirements)).folders
        return [Path(os.path.normpath(Path(self._own.workdir) / path)) for path in found]

    def _imported(self, modules: Mapping[str, str]) -> Iterator[tuple[str, str, int]]:
        """Yield what the user's own files import by name, where that went well; once each."""
        seen = set[str]()
        for file in sorted(Path(self.spec.workdir).rglob("*.py")):
            if str(file) != self.spec.script and str(file) not in modules.values():
                continue
            try:
                tree = ast.parse(file.read_bytes())
            except (OSError, SyntaxError, ValueError):
                continue
            for name, line in needed_imports(tree):
                if name in modules and name not in seen:
                    seen.add(name)
                    yield name, str(file), line


def needed_imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the top names that code imports and cannot do without, with their lines."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Try) and _may_fail(node):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0], node.lineno
        else:
            yield from needed_imports(node)


def _may_fail(node: ast.Try) -> bool:
    caught = [ast.unparse(each.type) if each.type else "Exception" for each in node.handlers]
    return any(re.search("ImportError|ModuleNotFound|Exception", each) for each in caught)


def _plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
