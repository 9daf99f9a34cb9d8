"""The keys of the run store, relative to `<store>/<run_id>/`. Nothing else builds them.

run.json                                              the spec, written once
code.json                                             by who begins or resumes it: its code
places/000001.json                                    by the controller: where the run goes on
controller/000001.json                                a node of the controller's own
clock/<machine>.json                                  for a moment: how old is the lease?
wishes/<ms>-<word>.json                               what the user asks of a controller elsewhere
attempts/000001/launch.json                           by the controller: place, price, nodes
attempts/000001/end.json                              by the controller: when it was gone, why
attempts/000001/claim.json                            create-if-absent, by the job's first rank
attempts/000001/stop.json                             create-if-absent, by the controller
attempts/000001/go.json                               by the controller: its turn has come
attempts/000001/heartbeat/00000.json                  overwritten, one for each node
attempts/000001/clock/<node>-<rank>.json              for a moment: to compare clocks
attempts/000001/events/<ms>-<node>-<rank>-<n>.json    append-only
attempts/000001/events/<ms>-<node>-<rank>-<n>.jsonl   older ones merged: that event, and before it
attempts/000001/logs/<node>-<ms>-<piece>-<lines>.jsonl.gz     what the node's ranks printed
attempts/000001/metrics/<rank>-<ms>-<piece>-<lines>.jsonl.gz  what a rank measured and logged
attempts/000001/profiles/request.json                 by who asks for a profile of some steps
attempts/000001/profiles/begin.json                   by the first rank: with which step it begins
attempts/000001/profiles/000001/<rank>.json           what a rank answers
attempts/000001/profiles/000001/<rank>.trace.json.gz  what it recorded
checkpoints/<step>-<attempt>/<shard>.safetensors      data
checkpoints/<step>-<attempt>/manifest.json            create-if-absent: this is the commit
checkpoints/<step>-<attempt>/pinned.json              optional: retention leaves it alone
frozen/000001/<shard>.safetensors                     what no step changes: checkpoints refer to it
cache/listings/000001-00000                           overwritten: a node's cached folders, sealed
cache/pieces/3f/<hash>                                of the files in them

Beside the runs lies what several of them share: `team-ledger.json`, and below `sweeps/<sweep_id>/`

sweep.json                                            what was asked for, written once
team-ledger.json                                      what its runs may cost together
values/<run_id>.json                                  by that run's controller: to be compared by
"""

from __future__ import annotations

import re
from typing import NamedTuple

RUN = "run.json"
CODE = "code.json"
"""Overwritten: which code the run has, each file by its hash."""
LEASE = "controller.json"
"""Overwritten: which machine's controller holds the run."""
TEAM = "team-ledger.json"
"""Beside the runs, at the root of their store; overwritten: what all of them may cost together."""
SWEEPS = "sweeps/"
"""Beside the runs: a folder for each sweep."""
SWEEP = "sweep.json"
VALUES = "values/"
CONTROLLER_NODES = "controller/"
"""One object for each node that the run's controller has, or had, for itself."""
WISHES = "wishes/"
WISHES_READ_AT = f"{WISHES}read-at"
"""One object for each thing that the user asks of a controller on another machine, until done."""
ATTEMPTS = "attempts/"
PLACES = "places/"
"""One object for each move of the run, and for each phase after the first."""
CHECKPOINTS = "checkpoints/"
FROZEN = "frozen/"
CACHE_LISTINGS = "cache/listings/"
CACHE_PIECES = "cache/pieces/"
MAX_ATTEMPT = 10**6 - 1
"""Six digits name an attempt."""

_CHECKPOINT = re.compile(r"checkpoints/(\d{12})-(\d{6})/")
_WRITER = re.compile(r"attempts/\d{6}/events/\d+-(\d+-\d+)-\d+\.jsonl?")
_PLACE = re.compile(r"places/\d{6}\.json")
_CONTROLLER_NODE = re.compile(r"controller/(\d{6})\.json")
_ATTEMPT = re.compile(r"attempts/(\d{6})/")
_LISTING = re.compile(r"cache/listings/(\d{6})-(\d{5})")
_VALUES = re.compile(r"values/(.+)\.json")
_PROFILE = re.compile(r"attempts/\d{6}/profiles/(\d{6})/(\d{5})\.json")
_PIECE = re.compile(r"attempts/\d{6}/\w+/((\d{5})-\d{13})-(\d{6})-(\d{7})\.jsonl\.gz")
RUN_ID_PATTERN = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
"""A run id is also a cluster name and a folder: lower case, digits, dashes, at most 63."""


def sweep(sweep_id: str) -> str:
    """Return the prefix of a sweep, below the root of the runs, with its trailing slash."""
    return f"{SWEEPS}{sweep_id}/"


def values(run_id: str) -> str:
    """Return the key, in a sweep's part of the store, of what one of its runs is compared by."""
    return f"{VALUES}{run_id}.json"


def parse_values(key: str) -> str | None:
    """Return the run of such a key; None if it is none."""
    match = _VALUES.fullmatch(key)
    return match[1] if match and RUN_ID_PATTERN.fullmatch(match[1]) else None


def is_run_folder(name: str) -> bool:
    """Tell whether a folder at the root of a store may be a run's."""
    return RUN_ID_PATTERN.fullmatch(name) is not None and f"{name}/" != SWEEPS


def attempt(number: int) -> str:
    """Return the prefix of an attempt, with its trailing slash."""
    return f"{ATTEMPTS}{number:06d}/"


def place(number: int) -> str:
    """Return the key of a move of the run, or of a phase's beginning; the first is 1."""
    return f"{PLACES}{number:06d}.json"


def is_place(key: str) -> bool:
    """Tell whether a key is one of those."""
    return _PLACE.fullmatch(key) is not None


def controller_node(number: int) -> str:
    """Return the key of a node that the run's controller has for itself; the first is 1."""
    return f"{CONTROLLER_NODES}{number:06d}.json"


def parse_controller_node(key: str) -> int | None:
    """Return the number in the key of such a node, else None."""
    match = _CONTROLLER_NODE.fullmatch(key)
    return int(match[1]) if match else None


def wish(at: float, word: str) -> str:
    """Return the key of something that the user asks for; keys sort by time."""
    return f"{WISHES}{int(at * 1000):013d}-{word}.json"


def launch(number: int) -> str:
    """Return the key of what the controller launched as an attempt."""
    return f"{attempt(number)}launch.json"


def end(number: int) -> str:
    """Return the key of the controller's verdict on an attempt."""
    return f"{attempt(number)}end.json"


def claim(number: int) -> str:
    """Return the key of an attempt's claim."""
    return f"{attempt(number)}claim.json"


def stop(number: int) -> str:
    """Return the key by which the controller asks an attempt to save and stop."""
    return f"{attempt(number)}stop.json"


def go(number: int) -> str:
    """Return the key by which the controller says that an attempt's turn has come."""
    return f"{attempt(number)}go.json"


def group(number: int) -> str:
    """Return the key of the nodes that begin an attempt in place, on the cluster before it."""
    return f"{attempt(number)}group.json"


def joining(number: int) -> str:
    """Return the prefix under which each node says whether it would begin an attempt in place."""
    return f"{attempt(number)}joining/"


def joining_node(number: int, node: int) -> str:
    """Return the key of one node's word on that."""
    return f"{joining(number)}{node:05d}.json"


def heartbeat(number: int, node: int) -> str:
    """Return the key of a node's overwritten heartbeat."""
    return f"{attempt(number)}heartbeat/{node:05d}.json"


def heartbeats(number: int) -> str:
    """Return the prefix of all heartbeats of an attempt."""
    return f"{attempt(number)}heartbeat/"


def lease_clock(machine: str) -> str:
    """Return the key under which a machine that would take over has the store stamp the time."""
    return f"clock/{machine}.json"


def clock(number: int, *, node: int, rank: int) -> str:
    """Return the key under which a rank has the store stamp the time, once."""
    return f"{attempt(number)}clock/{node:05d}-{rank:05d}.json"


def events(number: int) -> str:
    """Return the prefix of an attempt's events."""
    return f"{attempt(number)}events/"


def event(number: int, *, at: float, node: int, rank: int, count: int) -> str:
    """Return the key of one event; keys sort by time."""
    return f"{events(number)}{int(at * 1000):013d}-{node:05d}-{rank:05d}-{count:06d}.json"


AGENT_RANK = 99_999
"""Stands for a node's agent, which is no rank, in the key of an event."""


def chunk(last_event: str) -> str:
    """Return the key of a chunk: merged events of one writer, of which this is the last.

    It sorts right behind that event, so a listing of what came after an instant has it, too.
    """
    return f"{last_event}l"


def is_chunk(key: str) -> bool:
    """Tell whether a key below `events` is one of merged events."""
    return key.endswith(".jsonl")


def writer_of(key: str) -> str:
    """Return which node and rank wrote an event or a chunk; empty if the key is foreign."""
    match = _WRITER.fullmatch(key)
    return match[1] if match else ""


def logs(number: int) -> str:
    """Return the prefix of what an attempt's ranks printed."""
    return f"{attempt(number)}logs/"


def metrics(number: int) -> str:
    """Return the prefix of what an attempt's ranks measured and logged."""
    return f"{attempt(number)}metrics/"


def profiles(number: int) -> str:
    """Return the prefix of what was profiled of an attempt."""
    return f"{attempt(number)}profiles/"


def profile_request(number: int) -> str:
    """Return the key by which somebody asks an attempt for a profile."""
    return f"{profiles(number)}request.json"


def profile_begin(number: int) -> str:
    """Return the key by which the first rank says when the ranks begin to record."""
    return f"{profiles(number)}begin.json"


def profile_answer(number: int, *, profile: int, rank: int) -> str:
    """Return the key of what a rank answers; written after its trace."""
    return f"{profiles(number)}{profile:06d}/{rank:05d}.json"


def profile_trace(number: int, *, profile: int, rank: int) -> str:
    """Return the key of the trace that a rank recorded."""
    return f"{profiles(number)}{profile:06d}/{rank:05d}.trace.json.gz"


def parse_profile_answer(key: str) -> tuple[int, int] | None:
    """Return (profile, rank) of the key of such an answer, else None."""
    match = _PROFILE.fullmatch(key)
    return (int(match[1]), int(match[2])) if match else None


class Piece(NamedTuple):
    """One object of a writer's lines: see `storage.patterns.growing_lines`."""

    writer: str
    """Its index, and when it began to write, in milliseconds: no two have the same."""
    owner: int
    """The node whose log it is; the rank whose metrics they are."""
    number: int
    """Of the writer's pieces, from 0."""
    lines: int
    """How many lines are in it; of two objects of one piece, that with more replaces the other."""


def piece(folder: str, *, owner: int, at: float, number: int, count: int) -> str:
    """Return the key of a piece below `folder`, of a writer that began at `at`."""
    return f"{folder}{owner:05d}-{int(at * 1000):013d}-{number:06d}-{count:07d}.jsonl.gz"


def parse_piece(key: str) -> Piece | None:
    """Return what the key of a piece says; None if it is none."""
    match = _PIECE.fullmatch(key)
    return Piece(match[1], int(match[2]), int(match[3]), int(match[4])) if match else None


def checkpoint(step: int, number: int) -> str:
    """Return the prefix of a checkpoint, with its trailing slash; keys sort by step."""
    return f"{CHECKPOINTS}{step:012d}-{number:06d}/"


def manifest(checkpoint_prefix: str) -> str:
    """Return the key of a checkpoint's manifest."""
    return f"{checkpoint_prefix}manifest.json"


def frozen(number: int) -> str:
    """Return the prefix of what an attempt stored once, for all checkpoints that refer to it."""
    return f"{FROZEN}{number:06d}/"


def cache_listing(number: int, node: int) -> str:
    """Return the key of what an attempt's node has of its cached folders."""
    return f"{CACHE_LISTINGS}{number:06d}-{node:05d}"


def parse_cache_listing(key: str) -> tuple[int, int] | None:
    """Return (attempt, node) of the key of such a listing, else None."""
    match = _LISTING.fullmatch(key)
    return (int(match[1]), int(match[2])) if match else None


def cache_piece(digest: str) -> str:
    """Return the key of a piece of a cached file, by its hash."""
    return f"{CACHE_PIECES}{digest[:2]}/{digest}"


def pinned(checkpoint_prefix: str) -> str:
    """Return the key of the pin that keeps a checkpoint from being pruned."""
    return f"{checkpoint_prefix}pinned.json"


def parse_checkpoint(key: str) -> tuple[int, int] | None:
    """Return (step, attempt) of a key at or below a checkpoint prefix, else None."""
    match = _CHECKPOINT.match(key)
    return (int(match[1]), int(match[2])) if match else None


def parse_attempt(key: str) -> int | None:
    """Return the attempt number of a key below `attempts/`, else None."""
    match = _ATTEMPT.match(key)
    return int(match[1]) if match else None
