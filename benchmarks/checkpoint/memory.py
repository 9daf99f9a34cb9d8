"""Memory: what a save takes beyond the state, watched from outside in a process of its own."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.checkpoint.contestants import METHODS
from benchmarks.checkpoint.state import TrainingState

if TYPE_CHECKING:
    from collections.abc import Sequence

_SAVES = 2
_EVERY_S = 0.002
_KB = 1024


def measure_extra_memory(
    name: str, *, size_mb: float, tensors: int | None, device: str, folder: Path
) -> float | None:
    """Return the peak of extra memory over the state's size; None if the method cannot run.

    Counts the process and its children: private memory, and shared memory once. Page cache is
    not counted. The state's own tensors are there before.
    """
    command = [sys.executable, "-m", "benchmarks.checkpoint.memory", name, str(size_mb), device]
    with subprocess.Popen(
        [*command, str(tensors or 0), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if not process.stdout.readline().startswith("ready"):
            return None
        before = peak = _used_bytes(process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        while process.poll() is None:
            peak = max(peak, _used_bytes(process.pid))
            time.sleep(_EVERY_S)
        size = process.stdout.readline()
        return (peak - before) / int(size) if size else None


def _used_bytes(pid: int) -> int:
    used = [_memory_fields(each) for each in _family(pid)]
    private = sum(fields.get("RssAnon", 0) for fields in used)
    return private + max((fields.get("RssShmem", 0) for fields in used), default=0)


def _family(pid: int) -> list[int]:
    """Return a process and all below it, from /proc: cheap enough to ask hundreds of times."""
    found = [pid]
    try:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text(encoding="ascii").split():
                found += _family(int(child))
    except OSError:  # it ended meanwhile
        pass
    return found


def _memory_fields(pid: int) -> dict[str, int]:
    """Return the Rss lines of /proc/PID/status in bytes; nothing for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines if line.startswith("Rss"))
    return {name.rstrip(":"): int(value) * _KB for name, value, _ in pairs}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run in the process that is watched: build the state, say so, wait for the word, save."""
    parser = argparse.ArgumentParser(description="used by benchmarks.checkpoint")
    parser.add_argument("method")
    parser.add_argument("size_mb", type=float)
    parser.add_argument("device")
    parser.add_argument("tensors", type=int)
    parser.add_argument("folder")
    given = parser.parse_args(arguments)
    kind = next(kind for kind in METHODS if kind.name == given.method)
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="benchmark-") as folder:
        # A first small save pays for imports, threads and processes, which are not a save's.
        small = kind(_below(folder, "small"), TrainingState(size_mb=0.5, device=given.device))
        small.save(1).durable.result()
        small.close()
        state = TrainingState(
            size_mb=given.size_mb, tensors=given.tensors or None, device=given.device
        )
        method = kind(_below(folder, "real"), state)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
        for number in range(1, _SAVES + 1):
            pending = method.save(number)
            pending.wait_until_free()
            pending.durable.result()
            method.clear()
        method.close()
    sys.stdout.write(f"{state.size_bytes}\n")


def _below(folder: str, name: str) -> Path:
    path = Path(folder) / name
    path.mkdir()
    return path


if __name__ == "__main__":
    main()
