from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import pytest
import typer

from spotguard.cli.main import app
from tests.guards.golden import record
from tests.guards.golden.shapes import shape

if TYPE_CHECKING:
    from collections.abc import Iterator


def _commands_with_json(group: Any, path: str = "") -> Iterator[str]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands_with_json(command, f"{path}{name} ")
        elif any("--json" in parameter.opts for parameter in command.params):
            yield f"{path}{name}"


@pytest.mark.parametrize("part", record.PARTS)
def test_the_public_contract_is_as_it_is_on_record(part: str) -> None:
    """Fields of JSON, keys of the store, variables, exit codes, words and public names are kept."""
    path = record.path_of(part)
    on_record = path.read_text(encoding="utf-8").splitlines()
    now = record.made(part).splitlines()
    changed = "\n".join(difflib.unified_diff(on_record, now, "on record", "now", lineterm="", n=1))
    assert not changed, (
        f"others build on what changed here:\n{changed}\nUndo it; or, if it is meant, tell it in "
        f"CHANGELOG.md (a field that goes or changes needs a new schema number), then write the "
        f"record anew: {record.COMMAND}"
    )


def test_all_documents_are_on_record() -> None:
    """A command that learns `--json` has its document recorded, too."""
    missing = set(_commands_with_json(typer.main.get_command(app))) - set(record.recorded())
    assert not missing, f"add them to tests/cli/documents.py, then: {record.COMMAND}"


def test_a_shape_tells_what_changes_in_a_document() -> None:
    """A field's name, where it is, its types, and whether it is always there."""
    documents = [
        {"a": 1, "at": "2025-11-21T10:15:00.000Z", "list": [{"x": 1}, {"x": None, "y": "z"}]},
        {"a": 1.5, "at": None, "list": [], "names": {"AWS": True, "GCP": False}},
    ]
    assert shape(documents, maps={"names"}) == {
        "a": "number",
        "at": "instant | null",
        "list": "array",
        "list[]": "object",
        "list[].x": "integer | null",
        "list[].y": "string (not always)",
        "names": "object (not always)",
        "names.*": "boolean",
    }
