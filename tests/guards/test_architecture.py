from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from spotguard.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.same_everywhere

PACKAGE = Path(__file__).parents[2] / "spotguard"
ROOT = PACKAGE.parent
MODULES = sorted(PACKAGE.rglob("*.py"))

FOUNDATION = {"errors", "shared"}
STATE = {"checkpoint", "storage", "events"} | FOUNDATION
MAY_IMPORT = {
    "__init__": FOUNDATION,
    "integrations": {"runtime"} | STATE,
    "errors": set[str](),
    "shared": {"errors"},
    "events": FOUNDATION,
    "storage": {"events"} | FOUNDATION,
    "checkpoint": {"storage", "events"} | FOUNDATION,
    "runtime": STATE,
    "spec": STATE,
    "policy": {"events"} | FOUNDATION,
    "launch": STATE,
    "control": {"launch", "policy", "spec"} | STATE,
    "pages": {"control", "launch", "policy", "spec"} | STATE,
    "api": {"pages", "control", "launch", "policy", "spec"} | STATE,
    "cli": {"api"} | FOUNDATION,
    "testing": {"storage", "launch", "events"} | FOUNDATION,
}
"""The arrows of docs/architecture.md, each with all that lies further along it."""
EXCEPTIONS = {
    ("policy.plan.carbon.estimate", "launch.base"): "names its types for the type checker only",
    ("policy.plan.job", "launch.base"): "names its types for the type checker only",
    ("policy.plan.job", "spec.model"): "names its types for the type checker only",
}
HEAVY = {"typer", "pydantic", "pydantic_core", "boto3", "botocore", "sky", "rich", "requests"}
"""What a job must not wait for, and a bare node does not have."""
RUNTIME_SIDE = {"runtime", "checkpoint", "storage", "events"} | FOUNDATION


class Import(NamedTuple):
    """One imported name, and where."""

    module: str
    """The importing module, below `spotguard`."""
    name: str
    """Full dotted name of what is imported."""
    typing_only: bool
    local: bool
    """Inside a function, so not paid for at import."""


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _imports(path: Path) -> list[Import]:
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    found: list[Import] = []

    def visit(node: ast.AST, typing_only: bool, local: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue  # no import stands inside an expression
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                visit(child, True, local)
                continue
            names: list[str] = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"{path}: a relative import"
                names = [f"{child.module}.{alias.name}" for alias in child.names]
            found.extend(Import(module, name, typing_only, local) for name in names)
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            visit(child, typing_only, local or inside)

    visit(_tree(path), False, False)
    return found


@cache
def all_imports() -> list[Import]:
    """Return the imports of all modules, read when the first test asks for them."""
    return [found for path in MODULES for found in _imports(path)]


def _is_excepted(found: Import) -> bool:
    target = found.name.removeprefix("spotguard.")
    for (module, allowed), why in EXCEPTIONS.items():
        if found.module == module and target.startswith(f"{allowed}."):
            return found.typing_only or "type checker" not in why
    return False


def test_arrows_point_one_way() -> None:
    """No module imports against the arrows of the architecture, not even inside a function."""
    wrong = []
    for found in all_imports():
        if not found.name.startswith("spotguard."):
            continue
        source, target = found.module.split(".")[0], found.name.split(".")[1]
        if target in (source, "__version__", "SpotguardError") or _is_excepted(found):
            continue
        if target not in MAY_IMPORT[source]:
            wrong.append(f"{found.module} imports {found.name}")
    assert not wrong


FLOORS = {
    "runtime": (
        *(
            "state",
            "checks",
            "data",
            "distributed",
            "process",
            "preemption",
            "checkpoint",
            "reporting",
        ),
        "ending",
        *("step", "job", "loop", "run_data", "run", "starting", "__init__"),
    ),
    "control": (
        *("home_name", "journal", "supervisor", "run_folder"),
        *("status", "controller", "checkpoints", "create_run", "handover", "without_journal"),
        *("report", "sweep", "api", "doctor", "drill", "__main__", "__init__"),
    ),
    "storage": (
        *("base", "keys", "urls", "buffers", "deadline", "small_objects", "patterns"),
        *("credentials", "prefixed", "http", "remote", "filesystem", "s3", "gcs", "azure"),
        "__init__",
    ),
}
"""The folders and modules of a package from the ground up: each imports only what stands before."""


def _floor(package: str, module: str) -> int:
    rest = module.removeprefix(package).removeprefix(".")
    return FLOORS[package].index(rest.split(".")[0] if rest else "__init__")


def _module_of(name: str) -> str:
    """Return the module, below `spotguard`, that an imported name is or comes from."""
    parts = name.split(".")[1:]
    while parts:
        path = PACKAGE.joinpath(*parts)
        if path.is_dir() or path.with_suffix(".py").exists():
            return ".".join(parts)
        parts = parts[:-1]
    return ""


@pytest.mark.parametrize("package", FLOORS)
def test_folders_of_a_package_import_one_way(package: str) -> None:
    """No folder imports from one above it, not even inside a function; types may be named."""
    wrong = []
    for found in all_imports():
        target = _module_of(found.name) if found.name.startswith("spotguard.") else ""
        within = found.module.split(".")[0] == package == target.split(".")[0]
        if within and not found.typing_only:
            source = found.module.removesuffix(".__init__")
            if _floor(package, source) < _floor(package, target):
                wrong.append(f"{found.module} imports {found.name}")
    assert not wrong


def _is_kept(room: Path) -> bool:
    """Return False for what a folder leaves that was moved: the compiled modules it held."""
    return room.is_file() or any("__pycache__" not in path.parts for path in room.rglob("*.*"))


def test_no_folder_has_more_than_fifteen_rooms() -> None:
    """Who looks into a folder sees what is in it at one glance."""
    no_rooms = {"__init__.py", "__main__.py", "__pycache__", "conftest.py", "py.typed"}
    folders = [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir())]
    for top in ("benchmarks", "tests", "docs", "examples", "infra", "task_templates"):
        folders += [ROOT / top, *(path for path in (ROOT / top).rglob("*") if path.is_dir())]
    crowded = [
        f"{folder.relative_to(ROOT)}: {len(rooms)}"
        for folder in folders
        if folder.name not in no_rooms
        and folder != ROOT / "docs" / "schemas"  # which has a file for each command
        and len(rooms := {room.name for room in folder.iterdir() if _is_kept(room)} - no_rooms) > 15
    ]
    assert not crowded


def test_every_package_has_its_arrows() -> None:
    """A new package or module at the top must say where it stands, and none is listed in vain."""
    there = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES}
    assert there == set(MAY_IMPORT)
    for module, target in EXCEPTIONS:
        assert any(
            found.module == module and found.name.startswith(f"spotguard.{target}.")
            for found in all_imports()
        ), f"{module} does not import {target} any more"


def test_a_wrong_arrow_would_be_seen(tmp_path: Path) -> None:
    """The guard sees imports at the top, in functions and under TYPE_CHECKING."""
    path = PACKAGE / "launch" / "_imagined.py"
    text = "import sky\ndef f():\n    from spotguard.cli import main\n"
    source = tmp_path / "m.py"
    source.write_text(text + "if TYPE_CHECKING:\n    import rich\n")

    class Imagined(type(path)):  # type: ignore[misc]
        def read_text(self, *_: object, **__: object) -> str:
            return source.read_text()

    found = _imports(Imagined(path))
    assert [(i.name, i.typing_only, i.local) for i in found] == [
        ("sky", False, False),
        ("spotguard.cli.main", False, True),
        ("rich", True, False),
    ]


def test_jobs_load_nothing_heavy() -> None:
    """What runs inside a job never asks for the command line's or a cloud's packages at import."""
    wrong = [
        f"{found.module} imports {found.name}"
        for found in all_imports()
        if found.module.split(".")[0] in RUNTIME_SIDE
        and found.name.split(".")[0] in HEAVY
        and not (found.local or found.typing_only)
    ]
    assert not wrong


@pytest.mark.parametrize("path", [p for p in MODULES if p.name == "__init__.py"], ids=str)
def test_exported_names(path: Path) -> None:
    """`__all__` is sorted and short, and every name in it is there."""
    tree = _tree(path)
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
            assert names == sorted(names, key=str.lower)
            assert len(names) == len(set(names)) <= 12
            module = ".".join(["spotguard", *path.parent.relative_to(PACKAGE).parts])
            try:
                loaded = __import__(module, fromlist=["__all__"])
            except MissingExtra as missing:
                pytest.skip(missing.message)
            assert all(hasattr(loaded, name) for name in names)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_stay_readable(path: Path) -> None:
    """No module above 600 lines, and each says in its first line what it is."""
    text = path.read_text()
    assert len(text.splitlines()) <= 600
    if path.name != "__main__.py":
        assert ast.get_docstring(ast.parse(text))


FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "telnetlib"}
FORBIDDEN_CALLS = {
    *("eval", "exec", "os.system", "os.popen", "torch.load", "torch.save", "yaml.load"),
    *("subprocess.getoutput", "subprocess.getstatusoutput"),
}


def _dangers(path: Path) -> Iterator[str]:
    for found in _imports(path):
        if found.name.split(".")[0] in FORBIDDEN_MODULES:
            yield f"imports {found.name}"
    for node in ast.walk(_tree(path)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in FORBIDDEN_CALLS and not _only_weights(name, node):
            yield f"line {node.lineno} calls {name}"
        if any(k.arg == "shell" and ast.unparse(k.value) != "False" for k in node.keywords):
            yield f"line {node.lineno} uses a shell"


def _only_weights(name: str, call: ast.Call) -> bool:
    return name == "torch.load" and any(
        k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in call.keywords
    )


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_runs_code_from_data(path: Path) -> None:
    """No pickle, no eval, no shell: data never becomes a program."""
    assert not list(_dangers(path))


def test_only_eight_places_catch_everything() -> None:
    """`except Exception` stands at the top of the CLI, of watchers and drains, and nowhere else."""
    allowed = {
        "cli.main": "the top of the command line",
        "control.controller.process": "a run whose controller fails takes no other one with it",
        "launch.skypilot.sdk": "SkyPilot's server sends whatever it met, to be raised again here",
        "runtime.preemption.stop_sources": "no answer of a metadata service may end the watch",
        "runtime.checks.walker": "an object may be of any make, and no check ends a training",
        "runtime.reporting.profiling": "no profile is worth a job, whatever torch or a disk raises",
        "runtime.reporting.trackers": "a tracker of others may raise anything, and ends no thread",
        "runtime.checkpoint.saver": "a background save that fails must be told, whatever the cause",
    }
    found = []
    for path in MODULES:
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found += [
            module
            for node in ast.walk(_tree(path))
            if isinstance(node, ast.ExceptHandler)
            and (node.type is None or ast.unparse(node.type) == "Exception")
        ]
    assert sorted(found) == sorted(allowed)


def test_whatever_others_may_have_written_is_read_up_to_a_limit() -> None:
    """Each whole read of a store's object says how much it takes; torch's store has no such."""
    unbounded = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in MODULES
        if path.relative_to(PACKAGE).parts[0] != "testing" and path.stem != "rendezvous"
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "get"
        and ast.unparse(node.func.value).split(".")[-1] in ("store", "_store")
        and len(node.args) == 1
        and not node.keywords
    ]
    assert unbounded == [], "pass max_bytes, or use storage.small_objects"


def test_no_class_name_means_two_things() -> None:
    """A public class is known by its name alone, wherever it is read.

    But what each framework's integration offers under one name, as the frameworks do themselves;
    and a run, which is one thing to the job that is in it and to the program that looks after it.
    """
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith(
                ("_", "SpotguardCallback")
            ):
                homes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert homes.pop("Run") == ["api/run.py", "runtime/run.py"]
    assert not {name: where for name, where in homes.items() if len(where) > 1}


def _private_names(tree: ast.AST) -> set[str]:
    """Return the private methods and attributes of the classes in a module."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    names |= {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_no_private_name_of_a_job_is_read_in_another_module() -> None:
    """What a class in the job keeps to itself can be changed by who reads that file alone."""
    trees = {path: ast.parse(path.read_text()) for path in (PACKAGE / "runtime").rglob("*.py")}
    own = {path: _private_names(tree) for path, tree in trees.items()}
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} reads {ast.unparse(node)}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        if node.attr not in own[path]
        if any(node.attr in names for other, names in own.items() if other != path)
    ]
    assert not wrong
