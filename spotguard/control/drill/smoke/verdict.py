"""What a process of a smoke proves: that the script works, does not, or nothing at all."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spotguard.control.drill.smoke.process import signal_name
from spotguard.events.event import JobEvent
from spotguard.shared.paths import expanded
from spotguard.shared.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from spotguard.control.drill.smoke.places import Code, CodeLine
    from spotguard.control.drill.smoke.process import Facts

_LOOP = ("steps", "epochs", "begin_step", "restore", "fit", "train", "survives")
_ANYWAY: Final = "--no-smoke launches it without a look"
_CUDA = re.compile(r"cuda|nvidia|\bnccl\b|\bgpus?\b", re.I)
_NO_MEMORY = re.compile(
    "can't allocate memory|out of memory|cannot allocate memory"
    "|thread creation failed|can't start new thread",  # for want of room for its stack
    re.I,
)
_NO_ROOM = re.compile(r"no space left|disk quota|no room", re.I)
_OF_SIZES = frozenset({"RuntimeError", "ValueError", "IndexError", "AssertionError"})
_KERNEL = re.compile(
    r"cuda|nvidia|\bnccl\b|\bgpus?\b|triton|libcu\w+\.so|not implemented for '(?:Half|BFloat16)'",
    re.I,
)
"""What libraries say that have no way but a GPU."""
_NO_NETWORK = frozenset(
    {
        *("ConnectionError", "ConnectTimeout", "ConnectTimeoutError", "EndpointConnectionError"),
        *("NoCredentialsError", "ClientError", "gaierror", "URLError", "MaxRetryError"),
        *("LocalEntryNotFoundError", "OfflineModeIsEnabled", "SSLError", "ProxyError"),
    }
)
_OF_NETWORKS = frozenset(
    {
        *("ssl.py", "socket.py", "http", "urllib", "urllib3", "requests", "httpx", "httpcore"),
        *("aiohttp", "fsspec", "huggingface_hub", "boto3", "botocore", "s3transfer"),
    }
)
"""Files and packages in which a process waits for what it downloads."""
_OF_PROGRAMS = frozenset({"subprocess.py"})
"""Files in which a process waits for a program that it has started, which may download."""
_ABSOLUTE = re.compile(r"'(/[^']+)'")
_NO_FILE = frozenset({"FileNotFoundError", "NotADirectoryError", "IsADirectoryError"})
_OURS_NEED = ("torch", "xxhash")
_NO_GUARD = "has finished its bootstrapping phase"
"""What multiprocessing says in a process that it spawned, of a script without a guard."""
_OUTSIDE = "outside of a loop of spotguard"
_IDLE_CORES = 0.2
_MESSAGE_CHARS = 300


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """The script does not work; nothing is launched."""

    what: str
    """One sentence that names file and line."""
    hint: str
    may_be_size: bool = False
    """A step of other batches than the script's own may be what fails."""


@dataclass(frozen=True)
class Unproven:
    """Nothing is proven, for a reason that says nothing of the script on its nodes."""

    why: str


Verdict = Stopped | Unproven | None
"""None: it has done what it was to do."""


def judge(
    facts: Facts,
    code: Code,
    *,
    stop_after: int,
    ready_made: bool = False,
    mounted: Iterable[str] = (),
    gpus: bool = False,
) -> Verdict:
    """Return what a process proves.

    Args:
        facts: what it did.
        code: the user's.
        stop_after: steps that it was to have done, with those before it.
        ready_made: nodes start from an image or by commands of the user's, or are a cluster's own,
            so that they may have packages and files that this machine lacks.
        mounted: places that the nodes have, and this machine need not.
        gpus: nodes have GPUs, which this process was not shown.
    """
    ended = facts.event(JobEvent.ENDED) or {}
    if ended.get("saved_step") == stop_after:
        return None
    return (
        _of_machine(facts)
        or _of_time(facts, code)
        or _of_packages(facts, code, ready_made=ready_made)
        or _of_mounts(facts, mounted)
        or _of_elsewhere(facts, code, ready_made=ready_made, gpus=gpus)
        or _of_error(facts, code)
        or _of_crash(facts, code)
        or _of_save(facts, code)
        or _of_end(facts, code)
    )


def _of_machine(facts: Facts) -> Unproven | None:
    """Return that this machine is too small for the script."""
    told = facts.told
    words = f"{told.kind} {told.message}" if told else facts.printed[-2000:]
    if facts.ended_for == "memory" or facts.exit_code == -9 or _is_memory(words):
        return Unproven("the script needs more memory than this machine has free")
    if facts.ended_for == "disk" or (told and _NO_ROOM.search(words)):
        return Unproven("a save of the script needs more room than this machine's disk has")
    return None


def _is_memory(words: str) -> bool:
    return "MemoryError" in words or bool(_NO_MEMORY.search(words) and not _CUDA.search(words))


def _of_time(facts: Facts, code: Code) -> Verdict:
    """Return what it was at when its time was over."""
    if facts.ended_for != "time":
        return None
    place, innermost = code.in_stacks(facts.stacks)
    crowded = facts.idle is not None and facts.idle < _IDLE_CORES
    idles = facts.busy is not None and facts.busy < _IDLE_CORES and not crowded
    waits = idles or facts.rests is True
    if crowded and "importlib" in innermost:
        return Unproven("this machine is so busy that imports take longer than --smoke-limit")
    doing = ", waiting" if waits else ""
    after = format_duration(facts.seconds)
    longer = "if it needs longer: --smoke-limit 5m; " + _ANYWAY
    outside = [e for e in facts.events if _OUTSIDE in str(e.data.get("message"))]
    if not facts.in_loop and outside:
        return _unprotected(str(outside[0].data["message"]).partition(";")[0], place, code)
    if _NO_GUARD in facts.printed:
        what = "processes that it starts run the script again, from its first line, and never end"
        return Stopped(
            what=f"{code.told(place)}: {what}",
            hint=f"put what starts them below `if __name__ == '__main__':`; {_ANYWAY}",
        )
    if _is_elsewhere(facts, code) or _may_come(facts, code, innermost, waits=waits):
        step = facts.steps + 1
        is_at = f"step {step} is not done" if facts.in_loop else "the training loop is not reached"
        return Unproven(f"{code.told(place)}: {is_at} after {after} on this CPU (--smoke-limit)")
    if not facts.in_loop:
        what = f"after {after} it is still there{doing}, and the training loop is not reached"
        return Stopped(what=f"{code.told(place)}: {what}", hint=longer)
    what = f"step {facts.steps + 1} does not end: after {after} it is still there{doing}"
    return Stopped(what=f"{code.told(place)}: {what}", hint=longer)


def _is_elsewhere(facts: Facts, code: Code) -> bool:
    """Tell whether it waits for a network or a program, which is no fault of the script.

    Downloads have threads of their own; the main thread then only waits for these.
    """
    is_download = code.is_any_thread_in(facts.stacks, _OF_NETWORKS)
    return is_download or code.is_main_thread_in(facts.stacks, _OF_PROGRAMS)


def _may_come(facts: Facts, code: Code, innermost: str, *, waits: bool) -> bool:
    """Tell whether what it is at may end: slow work is no fault of the script."""
    if facts.in_loop:
        # On a crowded machine little work is no proof; a line of the user's own that does none is.
        does_nothing = facts.busy is not None and facts.busy < _IDLE_CORES
        return not waits and not (does_nothing and code.is_mine(innermost))
    return not (waits or code.is_mine(innermost))


def _of_packages(facts: Facts, code: Code, *, ready_made: bool) -> Verdict:
    told = facts.told
    if told is None or told.kind != "ModuleNotFoundError":
        return None
    name = told.message.rpartition("'")[0].rpartition("'")[2]
    if name.partition(".")[0] in _OURS_NEED:
        return Unproven(f"this machine's Python has no {name}")
    if ready_made:
        return Unproven(f"this machine lacks {name}, which the nodes' image or setup may bring")
    where = code.told(code.innermost(told.frames))
    return Stopped(
        what=f"{where}: {told.message}",
        hint=f"name what it is part of in the script's `# /// script` dependencies, or in "
        f"node.requirements; a module of your own has to lie beside the script; {_ANYWAY}",
    )


def _of_mounts(facts: Facts, mounted: Iterable[str]) -> Unproven | None:
    told = facts.told
    if told is None or told.kind not in _NO_FILE:
        return None
    for place in mounted:
        if str(expanded(place)) in told.message:
            return Unproven(f"{place} is there on the nodes (file_mounts, volumes), and not here")
    return None


def _of_elsewhere(facts: Facts, code: Code, *, ready_made: bool, gpus: bool) -> Unproven | None:
    """Return that it lacks what its nodes may have: their files, their network, their GPU."""
    told = facts.told
    if told is None:
        return None
    place = code.told(code.innermost(told.frames))
    if told.kind in _NO_NETWORK:
        return Unproven(f"{place}: {told.kind}, and the nodes' network and rights are others")
    path = _ABSOLUTE.search(told.message)
    if ready_made and told.kind in _NO_FILE and path and not code.has_below(path[1]):
        return Unproven(f"{path[1]} is not here, and may be on the nodes")
    if gpus and _KERNEL.search(told.message) and "cuda" not in place.lower():
        return Unproven(f"{place}: it needs a GPU; with run.device it could be tried here")
    return None


def _of_error(facts: Facts, code: Code) -> Verdict:
    told = facts.told
    if told is None or (told.is_exit and told.exit_code in (0, 75)):
        return None
    place = code.innermost(told.frames)
    if told.is_exit:
        return _of_exit(facts, code, place)
    last = [line for line in told.message.strip().splitlines() if line.strip()][-1:]
    inner = code.in_text(told.message)  # of a worker of a loader, in words
    place = inner or place or code.call_of(*_LOOP)
    said = (last[0].strip() if inner and last else told.message).strip()
    said = " ".join(said.split())[:_MESSAGE_CHARS]
    is_theirs = told.hint or inner
    what = said if is_theirs else f"{told.kind}: {said}" if said else told.kind
    return Stopped(
        what=f"{code.told(place)}: {what}",
        hint=told.hint or _way_out(facts, code),
        may_be_size=facts.in_loop and told.kind in _OF_SIZES and not _is_cuda(facts, code),
    )


def _of_exit(facts: Facts, code: Code, place: CodeLine | None) -> Stopped:
    """Return what an exit says: of a text its own words, else the last line that was printed."""
    told = facts.told
    assert told is not None
    printed = [line.strip() for line in facts.printed.splitlines() if line.strip()]
    said = told.message if told.exit_code is None else (printed[-1] if printed else "")
    said = f": {' '.join(said.split())[:_MESSAGE_CHARS]}" if said else ""
    code_told = f" with code {told.exit_code}" if told.exit_code is not None else ""
    ours = facts.event(JobEvent.ENDED) or {}
    if ours.get("message") and told.exit_code not in (None, 2):
        said = f": {' '.join(str(ours['message']).split())[:_MESSAGE_CHARS]}"
    return Stopped(
        what=f"{code.told(place)}: it leaves{code_told}{said}",
        hint=f"the script's own arguments come after `--`; {_ANYWAY}",
    )


def _way_out(facts: Facts, code: Code) -> str:
    """Return the hint for an error of the script's."""
    told = facts.told
    assert told is not None
    if _is_cuda(facts, code):
        return (
            "take the device from the run, which is this rank's GPU on a node and the CPU here: "
            "model.to(run.device), batch.to(run.device), and leave the process group to "
            f"spotguard.init(); {_ANYWAY}"
        )
    if told.kind in _NO_FILE:
        return (
            "nodes have what is below the workdir, where the script runs, and what --file-mount "
            f"puts there; {_ANYWAY}"
        )
    if told.kind == "EOFError":
        return f"nobody types on a node: the script must not read its input; {_ANYWAY}"
    return f"mend it, then try again; {_ANYWAY}"


def _is_cuda(facts: Facts, code: Code) -> bool:
    told = facts.told
    assert told is not None
    return bool(_CUDA.search(f"{told.message} {code.told(code.innermost(told.frames))}"))


def _of_crash(facts: Facts, code: Code) -> Verdict:
    if facts.exit_code is None or facts.exit_code >= 0:
        return None
    place, _ = code.in_stacks(facts.stacks)
    name = signal_name(facts.exit_code)
    return Stopped(what=f"{code.told(place)}: Python dies of {name} there", hint=_ANYWAY)


def _of_save(facts: Facts, code: Code) -> Verdict:
    """Return why what was trained is not saved."""
    failed = facts.event(JobEvent.SAVE_FAILED)
    ended = facts.event(JobEvent.ENDED) or {}
    said = str((failed or {}).get("problem") or ended.get("message") or "")
    if not facts.steps or not said or (failed is None and ended.get("reason") == "finished"):
        return None
    place = code.in_text(str(ended.get("traceback") or "")) or code.call_of("track")
    said = " ".join(said.split())[:_MESSAGE_CHARS]
    return Stopped(
        what=f"{code.told(place)}: the state after step {facts.steps} cannot be saved: {said}",
        hint=_ANYWAY,
    )


def _unprotected(said: str, place: CodeLine | None, code: Code) -> Stopped:
    return Stopped(
        what=f"{code.told(place)}: it trains in no loop of spotguard: {' '.join(said.split())}",
        hint=f"docs/coming-from.md has the ways in; {_ANYWAY}",
    )


def _of_end(facts: Facts, code: Code) -> Verdict:
    """Return what it means that the script ended by itself."""
    told = facts.told
    by_exit = code.innermost(told.frames) if told else None
    if not facts.in_loop:
        ended = facts.event(JobEvent.ENDED) or {}
        if ended.get("reason") == "unprotected":
            return _unprotected(str(ended.get("message")), code.call_of("step"), code)
        loop = code.call_of(*_LOOP)
        where = f", and {code.told(loop)} is never reached" if loop else ""
        how = "the script exits" if by_exit else "the script ends"
        place: CodeLine | None = by_exit or code.last
        if not told and facts.exit_code:
            how, place = f"the script leaves with code {facts.exit_code}", None
        there = " there" if place else ""
        return Stopped(
            what=f"{code.told(place)}: {how}{there} without a step of training{where}",
            hint=f"the loop over run.steps(...) must be reached by `python SCRIPT ARGS`; {_ANYWAY}",
        )
    if facts.steps == 0:
        return Stopped(
            what=f"{code.told(by_exit or code.call_of(*_LOOP))}: the loop is left before its first "
            "step has ended",
            hint=f"a step ends when its body is through; {_ANYWAY}",
        )
    return None


def nothing_learned(facts: Facts, code: Code) -> Stopped | str:
    """Return what steps that changed no weight prove, or what is to be told; empty if all is well.

    An optimizer that did not step yet may do so in a later step, unless no code says so; code that
    was not read may, if it is given the optimizer.
    """
    told = [e.data["unlearned"] for e in facts.events if isinstance(e.data.get("unlearned"), dict)]
    if not told:
        return ""
    seen = f"after {told[0].get('steps')} steps no weight has changed"
    if told[0].get("stepped") is True:
        if told[0].get("foreign") is True:
            place, why = code.call_of("track"), "the optimizers have none of the model's parameters"
            way = "make them with the parameters of the model that is tracked, as it is trained"
        else:
            place = code.call_of("zero_grad") or code.call_of("step")
            why = "no optimizer had a gradient when it stepped"
            way = "zero_grad() comes after step(), not between backward and it"
        return Stopped(what=f"{code.told(place)}: {seen}: {why}", hint=f"{way}; {_ANYWAY}")
    alone = code.attribute_alone("step")
    is_ours_alone = code.call_of("backward") and code.keeps_tracked()
    if code.never_uses("step") and (alone or is_ours_alone):
        why = "it is not called, for want of `()`" if alone else "nothing calls optimizer.step()"
        return Stopped(
            what=f"{code.told(alone or code.call_of('backward'))}: {seen}: {why}",
            hint=f"call optimizer.step() after the loop over the micro-batches; {_ANYWAY}",
        )
    return f"{code.told(code.call_of('step'))}: {seen}: no optimizer has stepped yet"
