from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from spotguard.cli.schemas import (
    DOCUMENTS,
    LIKE_MARKET_SHOW,
    LIKE_STATUS,
    SETTINGS,
    as_text,
    file_name,
    schemas,
)
from spotguard.spec.setting_catalogue import catalogue
from spotguard.spec.starter import starter_files
from tests.cli.documents import all_documents

pytestmark = pytest.mark.slow

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from tests.cli.documents import Documents

FOLDER = Path(__file__).parents[2] / "docs" / "schemas"
COMMAND = "python -m spotguard.cli.schemas docs/schemas"


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Documents:
    """Return what each command prints."""
    return all_documents(tmp_path_factory.mktemp("documents"))


def published(name: str) -> Any:
    """Return a schema as it is published."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def _files(folder: Path) -> list[Path]:
    """Return all files in and below a folder, by name."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(found, key=lambda path: _name(path, folder))


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def closed(schema: Any) -> Any:
    """Return a schema that refuses fields that it does not name; the published one lets them be."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    shut = {name: closed(value) for name, value in schema.items()}
    return {"additionalProperties": False, **shut} if "required" in schema else shut


def settings_refuse(text: str) -> str:
    """Return why the schema refuses a file of settings; empty if it takes it."""
    errors = Draft202012Validator(published(SETTINGS)).iter_errors(tomllib.loads(text))
    return "; ".join(error.message for error in errors)


def test_the_published_schemas_are_current() -> None:
    """They are what the types say, and there is no other file."""
    made = {f"{name}.json": as_text(schema) for name, schema in schemas().items()}
    there = {_name(path, FOLDER): path.read_text(encoding="utf-8") for path in _files(FOLDER)}
    old = [name for name in sorted(made | there) if made.get(name) != there.get(name)]
    assert not old, f"write them anew: {COMMAND}"


def test_the_command_that_writes_them_works(tmp_path: Path) -> None:
    """Also for a module that is run as a program."""
    made = tmp_path / "made"
    made.mkdir()
    subprocess.run([sys.executable, *COMMAND.split()[1:3], str(made)], check=True)
    assert [_name(path, made) for path in _files(made)] == sorted(f"{n}.json" for n in schemas())


@pytest.mark.parametrize("path", _files(FOLDER), ids=lambda path: str(path.stem))
def test_each_is_a_schema_and_says_where_it_is(path: Path) -> None:
    """Of the dialect that it names, at the address that it names."""
    schema = json.loads(path.read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    assert schema["$id"].endswith(f"/main/docs/schemas/{_name(path, FOLDER)}")


@pytest.mark.parametrize("command", [*DOCUMENTS, *LIKE_STATUS, *LIKE_MARKET_SHOW])
def test_what_a_command_prints_is_what_its_schema_says(command: str, documents: Documents) -> None:
    """Each field is named, has a type that is named, and is there."""
    strict = Draft202012Validator(closed(published(file_name(command))))
    assert documents[command]
    for printed in documents[command]:
        strict.validate(printed)
        for field in printed:
            broken = {name: value for name, value in printed.items() if name != field}
            assert not strict.is_valid(broken), f"{field} may be missing"
        assert not strict.is_valid({**printed, "no_such_field": 1})


def test_every_document_has_a_schema(documents: Documents) -> None:
    """A command that learns `--json` is listed."""
    assert set(documents) == {*DOCUMENTS, *LIKE_STATUS, *LIKE_MARKET_SHOW}


def test_a_new_field_breaks_nobody(documents: Documents) -> None:
    """What a later version adds is let be, in the document and in all that is in it."""
    [printed, *_] = deepcopy(documents["status"])
    printed["later"] = printed["attempts"][0]["later"] = "than this"
    Draft202012Validator(published("status")).validate(printed)
    printed["attempts"][0]["nodes"] = "two"
    with pytest.raises(ValidationError, match="'two' is not of type 'integer'"):
        Draft202012Validator(published("status")).validate(printed)


@pytest.mark.parametrize("key", list(catalogue()))
def test_the_examples_of_settings_are_taken(key: str) -> None:
    """As spotguard takes them."""
    table, _, name = key.rpartition(".")
    head = f"[{table}]\n" if table else ""
    assert settings_refuse(f"{head}{name} = {catalogue()[key].setting.example}") == ""


SAMPLES: tuple[Any, ...] = (
    *(True, False, 0, 1, 2, 3, 10, 256, 10**20, 0.0, 0.5, 3.0, -1, "", "x", "2", "10", "1:4", "4+"),
    *("yes", "off", "30s", "1h30m", "auto", "100 steps", "$200", "aws", "on-demand", "on_demand"),
    *("never", "fallback-after 20m", "A100:8", "docker:a/b:1", "my-gpt", "base", "."),
    *("p4d.24xlarge", "node=1@step=40:notice", "ended", ["budget 50", "waiting 30m"], "green"),
    *("http://a.example/x", [], ["a"], ["aws", "gcp"], ["http://a.example/x"], [1], {}),
    *({"A": "b"}, {"A": 1}, {"A": True}, {"min": 1, "max": 2}),
)


@pytest.mark.parametrize("key", list(catalogue()))
def test_the_schema_refuses_nothing_that_spotguard_takes(key: str) -> None:
    """An editor that marks what works would be switched off."""
    parse = catalogue()[key].setting.parse
    table, _, name = key.rpartition(".")
    schema = published(SETTINGS)
    for part in filter(None, (table, name)):
        schema = schema["properties"][part]
    taken = 0
    for sample in SAMPLES:
        try:
            parse(sample)
        except ValueError:
            continue
        taken += 1
        assert Draft202012Validator(schema).is_valid(sample), sample
    assert taken


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("bugdet = 200", "'bugdet' was unexpected"),
        ("[local]\nmtfb = 3", "'mtfb' was unexpected"),
        ("budget = [200]", "[200] is not of type"),
        ("market = 'spott'", "'spott' is not one of"),
        ("nodes = true", "True is not of type"),
        ("keep_last = 1", "1 is less than the minimum of 2"),
        ("[env]\nA = true", "True is not of type"),
        ("notify = 3", "3 is not of type"),
    ],
)
def test_mistakes_are_seen_while_they_are_typed(text: str, problem: str) -> None:
    """A name that does not exist, another type, another word, a number out of range."""
    assert problem in settings_refuse(text)


def test_what_init_writes_is_taken() -> None:
    """With each comment's '#' removed, too."""
    text = starter_files()["spotguard.toml"]
    lines = [line.removeprefix("# ") if " = " in line else line for line in text.splitlines()]
    assert settings_refuse(text) == ""
    assert settings_refuse("\n".join(lines)) == ""
