"""Which run and which checkpoint the user means.

A run of this machine is known by its id; any other is named by its place, and nothing but its
store is needed then.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotguard.checkpoint.lineage import folders, list_all, restorable
from spotguard.checkpoint.manifest import check_run, load_manifest
from spotguard.control.journal.fold import read_record
from spotguard.control.run_folder import find_run, folder_of, is_place, split_place
from spotguard.errors import UsageError
from spotguard.events import keys
from spotguard.storage import PrefixedStore, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from spotguard.checkpoint.lineage import CheckpointRef, Listing
    from spotguard.checkpoint.manifest import Manifest
    from spotguard.storage.base import ObjectStore

_WHICH = re.compile(r"(?:checkpoints/)?(\d{1,12})(?:-(\d{1,6}))?/?")
_LIST = "list them: spotguard checkpoints ls"


@dataclass(frozen=True, kw_only=True)
class OpenedRun:
    """A run whose checkpoints are looked at."""

    run_id: str
    store: ObjectStore
    at_rest: bool | None
    """Whether it has settled; None if this machine does not control it."""

    def manifest(self, ref: CheckpointRef) -> Manifest:
        """Return a checkpoint's manifest; raises as `load_manifest` and `check_run`."""
        return self.load(self.store, ref.prefix)

    def load(self, store: ObjectStore, prefix: str) -> Manifest:
        """Return what `manifest` does, for retention, which asks by store and prefix."""
        manifest = load_manifest(store, prefix)
        check_run(manifest, self.run_id)
        return manifest


def open_run(text: str | None) -> OpenedRun:
    """Return the run that the user means: an id, its beginning, STORE/RUN_ID, None the newest.

    Raises:
        UsageError: there is no such run.
    """
    if text is not None and is_place(text):
        return _open_by_place(text)
    folder = folder_of(find_run(text))
    with folder.journal() as journal:
        record = read_record(journal)
    return OpenedRun(
        run_id=folder.run_id,
        store=PrefixedStore(open_store(record.store_root), folder.run_id),
        at_rest=record.settled is not None and folder.controller_pid() is None,
    )


def find_checkpoint(
    store: ObjectStore, text: str | None = None, listing: Listing | None = None
) -> CheckpointRef:
    """Return the committed checkpoint that the user means.

    Args:
        store: the run's own.
        text: a step (`40`), a step and attempt (`40-2`), a prefix, or `latest`; None is `latest`,
            the newest in the run's history.
        listing: of the store, by a caller that has one; it is not asked then.

    Raises:
        UsageError: there is none, or several attempts have one of that step.
    """
    if text in (None, "latest"):
        newest = next(restorable(store, listing), None)
        if newest is None:
            raise UsageError("The run has no checkpoint to go on from yet.", hint=_LIST)
        return newest
    match = _WHICH.fullmatch(str(text))
    if match is None:
        raise UsageError(
            f"checkpoint: given {str(text)!r}; allowed: a step (40), a step and its attempt "
            f"(40-2), or latest",
            hint=_LIST,
        )
    step, attempt = int(match[1]), int(match[2]) if match[2] else None
    meant = [
        ref
        for ref in reversed(listing.refs if listing else folders(store))
        if ref.step == step and attempt in (None, ref.attempt)
    ]
    found = [ref for ref in meant if store.head(keys.manifest(ref.prefix)) is not None]
    if len(found) > 1:  # the run's history has at most one of a step
        inside = set(restorable(store))
        found = [ref for ref in found if ref in inside] or found
    if len(found) != 1:
        raise _not_one(short_name(step, attempt), step, found, list(committed(store)))
    return found[0]


def committed(store: ObjectStore) -> Iterator[CheckpointRef]:
    """Yield all committed checkpoints, newest first, also those outside the run's history."""
    listing = list_all(store)
    yield from (ref for ref in reversed(listing.refs) if ref in listing.committed)


def short_name(step: int, attempt: int | None) -> str:
    """Return what the user types for a checkpoint: `40-2`, or `40` for that of any attempt."""
    return str(step) if attempt is None else f"{step}-{attempt}"


def _open_by_place(text: str) -> OpenedRun:
    root, run_id = split_place(text)
    store = PrefixedStore(open_store(root), run_id)
    # A script that was started without `up` writes no run.json.
    if store.head(keys.RUN) is None and not store.list_folders(keys.ATTEMPTS):
        raise UsageError(
            f"There is no run at {text}: it has neither {keys.RUN} nor {keys.ATTEMPTS}.",
            hint="give the run's own place, as in `store` of `spotguard status --json`",
        )
    return OpenedRun(run_id=run_id, store=store, at_rest=None)


def _not_one(
    given: str, step: int, found: Sequence[CheckpointRef], known: Sequence[CheckpointRef]
) -> UsageError:
    if found:
        names = ", ".join(short_name(ref.step, ref.attempt) for ref in found)
        return UsageError(
            f"{len(found)} checkpoints outside the run's history are of step {given}: {names}.",
            hint=f"give the attempt too, e.g. {short_name(found[0].step, found[0].attempt)}",
        )
    hint = _LIST
    if known:
        nearest = min(known, key=lambda ref: abs(ref.step - step))
        hint = f"the nearest is {short_name(nearest.step, nearest.attempt)}; {_LIST}"
    return UsageError(f"There is no committed checkpoint {given}.", hint=hint)
