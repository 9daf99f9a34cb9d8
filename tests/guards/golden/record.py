"""Makes the record of the public contract, and reads what is on record."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tests.cli.documents import all_documents
from tests.guards.golden import names
from tests.guards.golden.shapes import shape

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER: Final = Path(__file__).parent
COMMAND: Final = "python -m tests.guards.golden"
_MAPS: Final = {
    *("store.rights", "store.notices_s", "store.emergency_saves[].fits", "clouds.disabled"),
    *("counters", "versions"),
}
"""Objects whose keys are names of clouds, of rights, or of what the script counts."""


def json_outputs() -> dict[str, Any]:
    """Return the fields of each command's document, of happenings by their kind."""
    with tempfile.TemporaryDirectory(prefix="spotguard-golden-") as folder:
        documents = all_documents(Path(folder))
    data = defaultdict(list)
    for told in documents["history"]:
        for line in told["history"]:
            data[line["kind"]].append(line.pop("data"))
    record: dict[str, Any] = {}
    for command, each in documents.items():
        fields = shape(each, maps=_MAPS)
        record[command] = "as of status" if fields == record.get("status") else fields
    record |= {f"history: data of {kind}": shape(each) for kind, each in data.items()}
    return dict(sorted(record.items()))


PARTS: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "exit_codes": names.exit_codes,
    "json_outputs": json_outputs,
    "public_names": names.public_names,
    "store_keys": names.store_keys,
    "variables": names.variables,
    "words": names.words,
}


def made(part: str) -> str:
    """Return a part of the record as it is by the code."""
    return json.dumps(PARTS[part](), indent=2, ensure_ascii=False) + "\n"


def path_of(part: str) -> Path:
    """Return the file that holds a part."""
    return FOLDER / f"{part}.json"


def recorded() -> list[str]:
    """Return the commands whose documents are on record."""
    return list(json.loads(path_of("json_outputs").read_text(encoding="utf-8")))
