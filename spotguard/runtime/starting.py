"""How the run of a process begins, and how another one can: `init` and `reset`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from spotguard.errors import SpotguardError, UsageError
from spotguard.events.message_seal import Lives
from spotguard.runtime.ending.leaving import Phase
from spotguard.runtime.job import Job
from spotguard.runtime.process.outside_loop import outside_loop
from spotguard.runtime.process.settings import Settings
from spotguard.runtime.process.surroundings import tell_uncaught_in_a_sentence
from spotguard.runtime.run import Run, Taken
from spotguard.runtime.state.rng import seed_setup


@dataclass(frozen=True)
class _Asked:
    """What `init` was asked for."""

    settings: Settings
    reseed: bool
    exact: str | None
    hyperparameters: str | None
    backend: str | None


@dataclass(frozen=True)
class _Begun:
    """The run of this process."""

    asked: _Asked
    job: Job
    taken: Taken
    run: Run


_begun: _Begun | None = None


def init(
    *,
    run_id: str | None = None,
    store: str | None = None,
    seed: int | None = None,
    save_every: str | None = None,
    keep_last: int | None = None,
    reseed: bool = True,
    exact: str | None = None,
    hyperparameters: str | None = None,
    peer_timeout: str | None = None,
    backend: str | None = None,
) -> Run:
    """Set up the run of this process and return it; call it once, early, on every rank.

    It reads the launcher's environment, creates the process group if there is none, and begins
    to listen for notices and signals. Without a launcher the script is a run of its own: saves
    go to `store` (default `./spotguard-runs`), and giving `run_id` again resumes it.

    What the environment of a launcher says wins over these arguments. Called again with the same
    ones, as when a notebook's cell is run twice, it returns the same run while nothing is tracked;
    after that `reset` must come before another `init`.

    Args:
        run_id: Name of the run in the store; lower-case letters, digits and dashes.
        store: Folder or URL of the store.
        seed: Seed of the sample order and of all randomness (default 0): Python, NumPy and torch
            are seeded here, so that what the script draws from here on, such as initial weights
            or a split of its data, is the same on all ranks and in every attempt.
        save_every: `auto` (from measured cost and risk), a duration (`30s`), or `100 steps`.
        keep_last: Checkpoints to keep, at least 2 (default 3).
        reseed: Seed Python, NumPy and torch here and per micro-batch, so that randomness does not
            depend on the number of ranks. False leaves the global generators to the script; their
            states are then saved, and restored on the same number of ranks.
        exact: `bitwise` adds up gradients in one order, so that weights and optimizer state are
            the same to the last bit on every number of ranks, and gives torch one CPU thread. By
            default only the rounding differs between numbers of ranks.
        hyperparameters: `script` takes up at a resume what the script sets up otherwise than it did
            in the checkpoint: rates, decays, a scheduler's length, counters. Schedules are then
            counted anew up to where the training is. By default the checkpoint's values count, and
            what differs is told.
        peer_timeout: Duration in which all ranks leave, saved if they can, after another one's
            machine has vanished, or `off` (default `10s`). A process that dies is known at once;
            one that is frozen after three times as long.
        backend: Of the process group; default NCCL with CUDA, else gloo.

    Raises:
        UsageError: called again without `reset`, or a setting makes no sense.
        StoreError: the store cannot be used.
    """
    global _begun
    ask = partial(
        Settings.from_environment,
        run_id=run_id,
        store=store,
        seed=seed,
        save_every=save_every,
        keep_last=keep_last,
        peer_timeout=peer_timeout,
    )
    if _begun is not None:
        _refuse_another(
            _begun, same=_Asked(ask(), reseed, exact, hyperparameters, backend) == _begun.asked
        )
    else:
        try:
            _check_exact(exact, reseed=reseed)
            if hyperparameters not in (None, "script"):
                raise UsageError(
                    f"spotguard.init: hyperparameters is {hyperparameters!r}; allowed: script"
                )
            asked = _Asked(ask(), reseed, exact, hyperparameters, backend)
            job = Job(
                asked.settings,
                backend=backend,
                save_random=not reseed,
                script_values=hyperparameters is not None,
            )
        except SpotguardError:
            tell_uncaught_in_a_sentence()
            raise
        taken = Taken()
        run = Run(job, taken, reseed=reseed, bitwise=exact is not None)
        _look_out(job, taken)
        _begun = _Begun(asked, job, taken, run)
    if reseed:
        seed_setup(_begun.run.seed)
    return _begun.run


def reset() -> None:
    """End the run of this process, so that the next `init` begins another one; for notebooks.

    The run ends as it would with its script: a save in flight is waited for, a loop that was left
    early is saved, and the end is written. Threads, signal handlers, hooks on optimizers and the
    like are given back. Of several ranks all must call it; their process group stays, for the next
    run. Without a run nothing happens.

    Raises:
        UsageError: called inside the training loop, or in an attempt that a launcher began.
        SpotguardError: the last save failed. The run is over all the same.
    """
    global _begun
    if _begun is None:
        return
    job, taken = _begun.job, _begun.taken
    _refuse_to_reset(job, taken)
    _begun = None
    try:
        job.reset()
    finally:
        taken.gives_back.close()
        Lives.over += 1


def _look_out(job: Job, taken: Taken) -> None:
    """Look whether optimizers step before a loop of ours begins."""
    if job.rank:
        return
    outside_loop.join(tell=job.warn, end=job.leaving.by_problem if job.settings.launched else None)
    taken.gives_back.callback(outside_loop.enter)


def _refuse_another(begun: _Begun, *, same: bool) -> None:
    """Raise unless a second `init` is that of a notebook's cell which is run again."""
    job = begun.job
    untouched = job.phase is Phase.SETUP and not begun.taken.in_loop and not job.keeper.objects
    if same and untouched:
        return
    raise UsageError(
        "spotguard.init() was called twice in one process",
        hint="an attempt of a launcher is its process's only one"
        if job.settings.launched
        else "call spotguard.reset() before it, which ends the run that the first one began",
    )


def _refuse_to_reset(job: Job, taken: Taken) -> None:
    """Raise unless the run may end here and now, for another one to begin."""
    if job.settings.launched:
        raise UsageError(
            "spotguard.reset(): a launcher began this attempt, which is its process's only one",
            hint="launch another run instead",
        )
    if job.is_fork:
        raise UsageError(
            "spotguard.reset() was called in a forked process",
            hint="only the process that called spotguard.init() can end its run",
        )
    if taken.in_loop:
        raise UsageError(
            "spotguard.reset() was called inside the loop over run.steps()",
            hint="leave the loop first, by break, or close() the iterator that it was held in",
        )


def _check_exact(exact: str | None, *, reseed: bool) -> None:
    if exact not in (None, "bitwise"):
        raise UsageError(f"spotguard.init: exact is {exact!r}; allowed: bitwise")
    if exact and not reseed:
        raise UsageError(
            'spotguard.init: exact="bitwise" needs reseed=True, or each rank draws its own numbers'
        )
