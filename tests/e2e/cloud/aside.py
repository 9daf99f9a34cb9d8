"""Questions that a test asks in a process of its own: pytest's may neither import `sky` nor dial.

    python aside.py enabled                 clouds that SkyPilot can use
    python aside.py clusters RUN            a run's clusters in SkyPilot's books, asked anew
    python aside.py bills RUN               {cluster: USD} of a run by SkyPilot's list of costs
    python aside.py read STORE KEY          a JSON object of a store
    python aside.py empty STORE             how many objects were deleted

The answer is JSON, in the last line of stdout: SkyPilot prints before it what it likes.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from spotguard.storage import open_store

if TYPE_CHECKING:
    from collections.abc import Callable


def enabled() -> list[str]:
    """Return the clouds that SkyPilot found credentials for."""
    from sky.client import sdk

    return [str(name).lower() for name in sdk.get(sdk.enabled_clouds())]


def clusters(run: str) -> list[str]:
    """Return the clusters of a run that are still there."""
    from spotguard.launch.skypilot.sdk import SkySdk

    names = [each.name for each in SkySdk().ours() if each.run_id == run]
    return [each.name for each in SkySdk().ours(names, fresh=True)] if names else []


def bills(run: str) -> dict[str, float]:
    """Return what SkyPilot says that each cluster of a run has cost."""
    import sky

    report = sky.get(sky.cost_report(days=1))
    return {e["name"]: float(e["total_cost"]) for e in report if e["name"].startswith(f"{run}-")}


def read(url: str, key: str) -> Any:
    """Return a JSON object of a store."""
    return json.loads(open_store(url).get(key))


def empty(url: str) -> int:
    """Delete all that is below a URL."""
    store = open_store(url)
    found = [info.key for info in store.list()]
    for key in found:
        store.delete(key)
    return len(found)


VERBS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (enabled, clusters, bills, read, empty)
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(VERBS[sys.argv[1]](*sys.argv[2:])) + "\n")
