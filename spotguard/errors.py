"""Every error that spotguard raises on purpose.

    SpotguardError                    1
    ├── UsageError                    2   what was asked for makes no sense
    │   └── SpecError                 2   one setting is wrong; names it
    ├── EnvironmentFailure            3   this machine or the store cannot do it
    │   ├── MissingExtra              3
    │   ├── StoreError                3
    │   │   ├── NotFound              3
    │   │   │   └── NoObject          3
    │   │   ├── AlreadyExists         3
    │   │   ├── StoreFull             3
    │   │   ├── TooLarge              3
    │   │   └── StoreUnavailable      3
    │   ├── DiskFailure               3
    │   ├── JournalDamaged            3
    │   ├── LaunchesDamaged           3
    │   └── LauncherFailure           3
    ├── CheckpointError              10
    │   ├── DamagedCheckpoint        10
    │   │   ├── ArchivedCheckpoint   10
    │   │   └── ForeignCheckpoint    10
    │   ├── StateMismatch            10
    │   │   └── BaseNotFound         10
    │   ├── UnsupportedState         10
    │   └── Fenced                   10
    ├── JobFailed                    10
    │   └── SmokeFailed              10
    ├── NoCapacity                   11
    ├── BudgetExhausted              20
    ├── DeadlineReached              21
    ├── ContactLost                  30
    └── Detached                     75

The numbers are the exit codes of the command line; `docs/exit-codes.md` explains each.
"""

from __future__ import annotations

from typing import ClassVar


class SpotguardError(Exception):
    """Base of every error raised on purpose; the CLI prints `hint` and exits with `exit_code`."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(SpotguardError):
    """What was asked for makes no sense, or names something that does not exist."""

    exit_code = 2


class SpecError(UsageError):
    """A setting is wrong. The message names the field, what was given and what is allowed."""

    def __init__(self, field: str, problem: str, *, hint: str = "") -> None:
        super().__init__(f"{field}: {problem}", hint=hint)
        self.field = field


class EnvironmentFailure(SpotguardError):
    """This machine, its packages or the store cannot do what is needed."""

    exit_code = 3


class MissingExtra(EnvironmentFailure):
    """An optional dependency is not installed; the hint is the exact pip command."""


class StoreError(EnvironmentFailure):
    """The run store refused or failed an operation."""


class NotFound(StoreError):
    """The store holds no object under this key."""


class NoObject(NotFound):
    """There is something in its place that is no object: a folder, or a pipe."""


class TooLarge(StoreError):
    """The object is larger than what the reader would take; it was not fetched."""


class AlreadyExists(StoreError):
    """A create-if-absent or if-match write lost: another writer was first."""


class StoreFull(StoreError):
    """The store has no room left."""


class StoreUnavailable(StoreError):
    """The store cannot be reached or written; nothing was changed."""


class DiskFailure(EnvironmentFailure):
    """A file of this machine is locked, or its disk is full. What it holds is intact."""


class JournalDamaged(EnvironmentFailure):
    """The run's journal cannot be read. It is left as it is; the run store still has the state."""


class LaunchesDamaged(EnvironmentFailure):
    """What is written down of a run's launches cannot be read. It is left as it is."""


class LauncherFailure(EnvironmentFailure):
    """The launcher failed for a reason that is neither capacity nor the job."""


class CheckpointError(SpotguardError):
    """Saving or restoring training state failed."""

    exit_code = 10


class DamagedCheckpoint(CheckpointError):
    """A checkpoint's bytes are not those its manifest promises."""


class ArchivedCheckpoint(DamagedCheckpoint):
    """A checkpoint's shards are in the store's archive: whole, and not to be read for hours."""


class ForeignCheckpoint(DamagedCheckpoint):
    """It was saved by another run, and only copied into this one's folder."""


class StateMismatch(CheckpointError):
    """The checkpoint and the script disagree about what there is to restore."""


class BaseNotFound(StateMismatch):
    """A file of a frozen base, to which a checkpoint refers, is missing or has changed."""


class UnsupportedState(CheckpointError):
    """A tracked object holds something that cannot be stored safely; named at `track()`."""


class Fenced(CheckpointError):
    """A later attempt has claimed the run; this one must not write any more."""


class JobFailed(SpotguardError):
    """The user's own script failed; its traceback is in `spotguard status`."""

    exit_code = 10


class SmokeFailed(JobFailed):
    """The script did not get through its first steps on this machine; nothing was launched."""


class NoCapacity(SpotguardError):
    """No place has the nodes that were asked for."""

    exit_code = 11


class BudgetExhausted(SpotguardError):
    """Spend reached the budget. The job was asked to save, and nodes were released, first."""

    exit_code = 20


class DeadlineReached(SpotguardError):
    """The deadline passed. The job was asked to save, and nodes were released, first."""

    exit_code = 21


class ContactLost(SpotguardError):
    """The run can be neither seen nor proven dead; nothing was killed."""

    exit_code = 30


class Detached(SpotguardError):
    """The run goes on in the background."""

    exit_code = 75
