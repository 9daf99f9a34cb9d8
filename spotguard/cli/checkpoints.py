"""`checkpoints ls|show|verify|prune|archive|pin|unpin|export`: looking after what is saved."""

# No postponed annotations: typer reads them, and ruff would move their imports away.
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spotguard.cli.common import JsonOption, YesOption
from spotguard.cli.terminal.output import confirm, console, note, print_json, say
from spotguard.cli.terminal.progress import bytes_progress
from spotguard.errors import CheckpointError, UsageError
from spotguard.shared.json_documents import document
from spotguard.shared.units import format_bytes, parse_duration_s

if TYPE_CHECKING:
    from spotguard.api.checkpoints import CheckpointRef, OpenedRun

RunOrPlace = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="The run's id, its unique beginning, or STORE/RUN_ID; default: the newest.",
    ),
]
_NEWEST = 100
"""Each one that is listed is looked at, which takes a bucket some requests."""
_MOST_ROWS = 100
"""Of each table that `show` prints; `--json` has all of them."""
AllOption = Annotated[bool, typer.Option("--all", help="List more than the 100 newest.")]
StepOption = Annotated[
    str | None,
    typer.Option(
        "--step",
        "-s",
        metavar="STEP",
        help="Which checkpoint: its step (40), or step and attempt (40-2); default: the newest "
        "in the run's history.",
    ),
]


def ls(run: RunOrPlace = None, *, every: AllOption = False, as_json: JsonOption = False) -> None:
    """List a run's checkpoints, newest first: what counts, what is damaged, what is pinned."""
    from spotguard.api.checkpoints import CheckpointsDocument, list_checkpoints, open_run
    from spotguard.cli.views.checkpoints import checkpoints_screen

    opened = open_run(run)
    rows = list_checkpoints(opened, newest=None if every else _NEWEST + 1)
    more = not every and len(rows) > _NEWEST
    rows = rows[:_NEWEST] if more else rows
    if as_json:
        listed = CheckpointsDocument(run_id=opened.run_id, checkpoints=tuple(rows), more=more)
        print_json(document(listed))
    elif rows:
        console().print(checkpoints_screen(rows))
        if more:
            say(f"these are the {_NEWEST} newest; --all lists the others, too")
    else:
        say(f"{opened.run_id} has no checkpoint yet")


def show(
    run: RunOrPlace = None,
    *,
    step: StepOption = None,
    every: Annotated[bool, typer.Option("--all", help="Show more than 100 tensors.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Tell what a checkpoint holds: tensors and where they are, counters, versions, parents."""
    from spotguard.api.checkpoints import (
        CheckpointDocument,
        describe,
        find_checkpoint,
        list_all,
        open_run,
    )
    from spotguard.cli.views.checkpoints import detail_screen

    opened = open_run(run)
    listing = list_all(opened.store)
    ref = find_checkpoint(opened.store, step, listing)
    detail = describe(opened, ref, listing)
    if as_json:
        print_json(document(CheckpointDocument(run_id=opened.run_id, detail=detail)))
    else:
        console().print(detail_screen(detail, opened.run_id, most=None if every else _MOST_ROWS))


def verify(
    run: RunOrPlace = None,
    *,
    step: StepOption = None,
    everything: Annotated[bool, typer.Option("--all", help="Verify every checkpoint.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read every byte of a checkpoint and compare it with what was written.

    Exits with 10 when something is damaged, and names the file; also if another run saved it.
    """
    from spotguard.api import checkpoints
    from spotguard.api.checkpoints import committed, find_checkpoint, open_run
    from spotguard.cli.views.checkpoints import verified_screen

    if everything and step is not None:
        raise UsageError("--all and --step exclude each other")
    opened = open_run(run)
    if everything:
        refs = list(committed(opened.store))
    else:
        refs = [find_checkpoint(opened.store, step)]
        checkpoints.check_own(opened, refs[0])
    with bytes_progress("verifying") as tell:
        results = checkpoints.verify(opened, refs, tell)
    validity = checkpoints.Validity
    broken = (validity.DAMAGED, validity.NEWER, validity.FOREIGN)
    intact = not any(item.condition in broken for item in results)  # what is archived is unread
    if as_json:
        verified = tuple(results)
        told = checkpoints.VerificationDocument(
            run_id=opened.run_id, ok=intact, checkpoints=verified
        )
        print_json(document(told))
    elif results:
        console().print(verified_screen(results))
    else:
        say("nothing to verify: there is no committed checkpoint")
    if not intact:
        raise typer.Exit(CheckpointError.exit_code)


def prune(
    run: RunOrPlace = None,
    *,
    keep_last: Annotated[
        int, typer.Option(metavar="N", min=2, help="Keep the N newest whole ones.")
    ] = 3,
    every: Annotated[
        int | None,
        typer.Option(metavar="STEPS", min=1, help="Also keep each whose step is a multiple."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only tell what would be deleted.")
    ] = False,
    yes: YesOption = False,
) -> None:
    """Delete old checkpoints of a run that is at rest.

    The last two, the newest `best`, every `final` and what is pinned stay in any case. A living
    run prunes itself.
    """
    from spotguard.api import checkpoints
    from spotguard.api.checkpoints import Retention, open_run
    from spotguard.cli.views.checkpoints import pruned_lines

    opened = open_run(run)
    policy = Retention(keep_last=keep_last, keep_every_steps=every)
    if not dry_run:
        checkpoints.check_at_rest(opened)
    planned = checkpoints.plan_prune(opened, policy)
    if not planned.checkpoints:
        say("nothing to delete")
        return
    for line in pruned_lines(planned):
        say(line)
    size, count = format_bytes(planned.size_bytes), len(planned.checkpoints)
    if dry_run:
        say(f"{count} would be deleted, {size}; nothing was")
        return
    if not yes:
        confirm(f"Delete these {count} ({size})?", refused="nothing was deleted")
    gone = checkpoints.prune(opened, policy)
    say(f"{len(gone.checkpoints)} deleted, {format_bytes(gone.size_bytes)} freed")


def archive(
    run: RunOrPlace = None,
    *,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="TIME", help="What is older: 90d, 12h.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only tell what would be moved.")
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Move old checkpoints of a run that is at rest to the store's coldest class.

    Keeping them is cheap there, and reading them takes hours: a resume passes over them. The last
    two, every `best` and `final`, and what is pinned stay where they are.
    """
    from spotguard.api import checkpoints as control
    from spotguard.api.checkpoints import open_run
    from spotguard.cli.views.checkpoints import archivable_table

    age_s = _age_s(older_than)
    opened = open_run(run)
    planned = control.plan_archive(opened, older_than_s=age_s)
    size, count = format_bytes(sum(item.size_bytes for item in planned)), len(planned)
    if planned and not as_json:
        console().print(archivable_table(planned))
    if planned and not dry_run:
        if not yes:
            confirm(f"Archive these {count} ({size})?", refused="nothing was moved")
        with bytes_progress("archiving") as tell:
            planned = control.archive(opened.store, planned, tell)
    if as_json:
        rows = tuple(item.row() for item in planned)
        told = control.ArchiveDocument(run_id=opened.run_id, archived=not dry_run, checkpoints=rows)
        print_json(document(told))
    elif not planned:
        say(
            "nothing to archive" if not count else "nothing was archived: all were pinned or pruned"
        )
    elif dry_run:
        say(f"{count} would be archived, {size}; nothing was")
    else:
        moved = format_bytes(sum(item.size_bytes for item in planned))
        say(f"{len(planned)} archived, {moved}; reading them again takes hours")


def _age_s(text: str) -> float:
    try:
        return parse_duration_s(text)
    except ValueError:
        raise UsageError(
            f"--older-than: {text!r} is no length of time", hint="give it like 90d or 12h"
        ) from None


def pin(
    run: RunOrPlace = None,
    *,
    step: StepOption = None,
    why: Annotated[str, typer.Option(metavar="TEXT", help="A note for later.")] = "",
) -> None:
    """Keep a checkpoint for good: neither the run nor `prune` deletes it."""
    from spotguard.api import checkpoints

    opened, ref = _opened(run, step)
    fresh = checkpoints.pin(opened.store, ref, why=why)
    say(f"{_name(opened, ref)} {'is pinned' if fresh else 'was pinned already'}")


def unpin(run: RunOrPlace = None, *, step: StepOption = None) -> None:
    """Leave a pinned checkpoint to retention again."""
    from spotguard.api import checkpoints

    opened, ref = _opened(run, step)
    was_pinned = checkpoints.unpin(opened.store, ref)
    say(f"{_name(opened, ref)} {'is pinned no longer' if was_pinned else 'was not pinned'}")


def export(
    run: RunOrPlace = None,
    *,
    step: StepOption = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            "-o",
            metavar="FILE",
            help="The file to write; default: RUN-step-STEP.safetensors in this folder.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE", help="Convert the weights: bf16, fp16 or fp32; default: as they are."
        ),
    ] = None,
    weights_only: Annotated[
        bool,
        typer.Option(
            "--weights-only/--everything",
            help="One model, ready for load_state_dict; or all tensors, the optimizer's too.",
        ),
    ] = True,
    object_name: Annotated[
        str | None,
        typer.Option(
            "--object",
            metavar="NAME",
            help="The model's name in run.track; default: model, or the only one.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Write a checkpoint as one plain safetensors file, whatever it was sharded over.

    Every byte is verified on the way. The file appears when it is whole, or not at all.
    """
    from spotguard.api.checkpoints import export as write

    if object_name is not None and not weights_only:
        raise UsageError("--everything and --object exclude each other")
    opened, ref = _opened(run, step)
    target = to or Path(f"{opened.run_id}-step-{ref.step}.safetensors")
    with bytes_progress("exporting") as tell:
        done = write(
            opened,
            ref,
            target,
            dtype=dtype,
            weights_only=weights_only,
            object_name=object_name,
            replace=force,
            on_progress=tell,
        )
    if done.left_out:
        note(f"note: left out, for these are no tensors: {', '.join(done.left_out)}")
    if done.overflowed:
        names = ", ".join(done.overflowed[:8]) + (" ..." if len(done.overflowed) > 8 else "")
        note(f"warning: too large for {dtype}, and infinite now: values in {names}")
    tensors = f"{done.tensors} tensor{'' if done.tensors == 1 else 's'}"
    say(f"wrote {target}: {tensors} of {_name(opened, ref)}, {format_bytes(done.size_bytes)}")


def _opened(run: str | None, step: str | None) -> "tuple[OpenedRun, CheckpointRef]":
    from spotguard.api.checkpoints import find_checkpoint, open_run

    opened = open_run(run)
    return opened, find_checkpoint(opened.store, step)


def _name(opened: "OpenedRun", ref: "CheckpointRef") -> str:
    from spotguard.api.checkpoints import short_name

    return f"checkpoint {short_name(ref.step, ref.attempt)} of {opened.run_id}"
