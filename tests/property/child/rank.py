"""What a rank of the property test does beside its script: count moments, be struck, tell its end.

The script is a stranger's and knows nothing of it. `SPOTGUARD_PROPERTY` holds JSON: the blow, the
store's fault, the planted bug, and whether the loop is left early. The fork server calls `begin`
before the script, and what that returns after it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.property.child.blows import Blows
from tests.property.child.bucket import use_buckets
from tests.property.child.moments import watch_moments
from tests.property.child.planted import plant
from tests.property.child.witness import Witness

if TYPE_CHECKING:
    from collections.abc import Callable

ASKED = "SPOTGUARD_PROPERTY"


def begin() -> Callable[[int], None]:
    """Watch this process; return what tells its end, to be called with the exit code."""
    asked: dict[str, Any] = json.loads(os.environ.pop(ASKED))
    folder = Path(asked["folder"])
    rank = int(os.environ.get("RANK", "0"))
    attempt = int(os.environ["SPOTGUARD_ATTEMPT"])
    (folder / f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
    blows = Blows(asked, folder, attempt, rank)
    witness = Witness()
    watch_moments(blows, witness, leave_at=asked.get("leave_at"))
    use_buckets(blows, folder)
    if asked.get("bug"):
        plant(asked["bug"])

    known = set(sys.modules)

    def end(code: int) -> None:
        if os.environ.get("SPOTGUARD_PROPERTY_LATE"):
            late = sorted(set(sys.modules) - known)
            Path(os.environ["SPOTGUARD_PROPERTY_LATE"]).write_text("\n".join(late))
        counts = folder / f"counts-{attempt}-{rank}.json"
        counts.write_text(json.dumps({"counts": blows.counts, "step": blows.step}))
        if not code:
            witness.write(folder / f"final-{attempt}-{rank}.npz")

    return end
