"""The numbers of a run at rest, kept beside its journal: of hundreds of old runs none is read.

To read a journal takes a tenth of a second, and this machine's runs are listed again and again. So
who has read one at rest leaves `at-rest.json`. It is a cache: it counts as long as the journal and
the live file are those that it was made of, to the nanosecond, and this version of spotguard made
it. It may be deleted at any time, and where it cannot be written nothing is lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from functools import cache
from typing import TYPE_CHECKING

from spotguard.control.journal import snapshot
from spotguard.control.journal.fold import read_record
from spotguard.control.journal.journal import making_sense
from spotguard.control.report.measures import RunMeasures, run_measures
from spotguard.control.report.time_use import TimeShare
from spotguard.control.status.footprint import RunFootprint
from spotguard.control.status.view import RunSummary
from spotguard.control.status.watch import summary
from spotguard.errors import SpotguardError
from spotguard.events.states import RunState
from spotguard.policy.plan.carbon.factors import Factor
from spotguard.shared.typed_json import TypedJson
from spotguard.shared.version import __version__

if TYPE_CHECKING:
    from spotguard.control.journal.record import RunRecord
    from spotguard.control.run_folder import RunFolder

Signs = tuple[int, ...]
_NO_CACHE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
_MEASURES = TypedJson(
    RunMeasures,
    {each.__name__: each for each in (RunSummary, RunState, TimeShare, RunFootprint, Factor)},
)


def signs_of(folder: RunFolder) -> Signs:
    """Return what changes with each event that is written, and with each new live file."""
    signs: list[int] = []
    journal = folder.journal_path
    for path in (str(journal), f"{journal}-wal", str(folder.live_path)):
        try:
            found = os.stat(path)  # noqa: PTH116 - twice as fast as Path's, for each file of 200 runs
        except OSError:
            signs.append(0)
        else:
            signs += (found.st_ino, found.st_mtime_ns, found.st_size)
    return tuple(signs)


def kept(folder: RunFolder, signs: Signs) -> RunMeasures | None:
    """Return the numbers of a run at rest, if they were kept and nothing has changed since."""
    try:
        told = json.loads(folder.at_rest_path.read_text("utf-8"))
        body = told["measures"]
        if told["made_by"] != _maker() or told["signs"] != [*signs]:
            return None
        if told["sha256"] != _digest(body):
            return None
        return _MEASURES.read(body)
    except _NO_CACHE:
        return None


def keep(folder: RunFolder, record: RunRecord, signs: Signs) -> RunMeasures:
    """Return the numbers of a run at rest, and keep them if its files are still as they were.

    `signs` are those from before the record was read.

    Raises:
        JournalDamaged: what its journal says makes no sense.
    """
    told = numbers_of(folder, record)
    if signs_of(folder) == signs:
        body = _MEASURES.text(told)
        whole = {"made_by": _maker(), "signs": signs, "measures": body, "sha256": _digest(body)}
        draft = folder.at_rest_path.with_suffix(f".{os.getpid()}.new")
        with contextlib.suppress(OSError):  # a full disk, a home that may only be read
            draft.write_text(json.dumps(whole), "utf-8")
            draft.replace(folder.at_rest_path)
    return told


def numbers_of(folder: RunFolder, record: RunRecord) -> RunMeasures:
    """Return the numbers of a run as it stands now; `JournalDamaged` as for `keep`."""
    line = summary(folder, record)
    with making_sense(folder.journal_path):
        return run_measures(record, line, folder.clock().now())


def run_line(folder: RunFolder) -> RunSummary:
    """Return one line on a run; reads its journal only if it goes on, or was never read at rest.

    Raises:
        JournalDamaged: its journal cannot be read or makes no sense.
    """
    signs = signs_of(folder)
    known = kept(folder, signs)
    if known is not None:
        return known.summary
    with folder.journal() as journal:
        record = read_record(journal)
    if record.settled is None:
        return summary(folder, record)
    return keep(folder, record, signs).summary


def keep_at_rest(folder: RunFolder) -> None:
    """Keep the numbers of a run that may just have come to rest; it may be anywhere else."""
    with contextlib.suppress(SpotguardError, OSError):
        run_line(folder)


@cache
def _maker() -> str:
    """Return what tells who made a cache from whoever would make another one of the same run."""
    return f"{__version__} {snapshot.fingerprint()} {_digest(_MEASURES.form)[:16]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
