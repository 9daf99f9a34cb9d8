"""Moving a checkpoint to and from S3: ours, rclone, boto3, obstore, s5cmd and the AWS CLI.

python -m benchmarks.object_store --json out.json

All move the same bytes to and from one `rclone serve s3` on loopback, in turns of random order.
Libraries move them from and into memory that is there, as a save and a restore do; programs from
and into files in memory (tmpfs), and their start counts. The server shares the processor with
them, so beside the time stands the processor time of the client alone: that is what is taken from
the training, and what bounds the rate where the server is not the limit.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import importlib.metadata
import importlib.util
import io
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import describe_machine
from spotguard.storage.remote.store import RemoteStore
from spotguard.storage.s3.bucket import S3Bucket
from tests.storage.harness.servers import rclone_s3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.storage.harness.servers import Server

OURS = "spotguard"
BUCKET = "bucket"
_MB = 1 << 20
_PART_BYTES = 16 * _MB
_THREADS = 8
_KB = 1024
_TMPFS = Path("/dev/shm")
# The server would hash each object again for each read of it, by several hashes at each write, and
# read ahead of each range: one would measure the server.
SERVER_FLAGS = ("--etag-hash", "", "--ignore-checksum", "--no-checksum", "--buffer-size", "0")


@dataclass(frozen=True, kw_only=True)
class Place:
    """What there is to move, and where."""

    data: bytearray
    """Moved up from here, as training state is."""
    back: bytearray
    """As large; moved down into this."""
    folder: Path
    """In memory; `data` and `back` are files in it for those that want files."""
    endpoint: str

    def file(self, name: str) -> Path:
        """Return a file's path."""
        return self.folder / name


@dataclass(frozen=True, kw_only=True)
class Mover:
    """A way that is ready to move."""

    up: Callable[[], object]
    down: Callable[[], object]
    in_file: bool = False
    """What came down is in the file `back`, not in memory."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to move bytes."""

    name: str
    opened: Callable[[Place], Mover]
    package: str = ""
    """What must be installed; empty if nothing."""
    program: str = ""
    """The program it runs, if it is one."""

    def missing(self) -> str:
        """Return why it cannot be measured; empty if it can."""
        if self.program and program_path(self.program) is None:
            return f"{self.name}: left out, because `{self.program}` is not on the path"
        if self.package and not importlib.util.find_spec(self.package):
            return f"{self.name}: left out, because `{self.package}` is not installed"
        return ""

    @property
    def title(self) -> str:
        """Its name, with the version of what it is."""
        return (
            f"{self.name} {importlib.metadata.version(self.package)}" if self.package else self.name
        )


def ours(place: Place) -> Mover:
    """Move as a save and a restore do."""
    store = RemoteStore(S3Bucket(f"s3://{BUCKET}/ours"))
    store.warm()
    return Mover(
        up=lambda: store.put("object", place.data),
        down=lambda: store.get_into("object", 0, memoryview(place.back)),
    )


def boto3_transfer(place: Place, *, tuned: bool) -> Mover:
    """Move by boto3's transfer manager, as it comes or with our part size and threads."""
    import boto3
    from boto3.s3.transfer import TransferConfig

    config = TransferConfig()
    if tuned:
        config = TransferConfig(
            multipart_chunksize=_PART_BYTES, max_concurrency=_THREADS, io_chunksize=_MB
        )
    client = boto3.client("s3")
    source: Any = _Memory(place.data)
    target: Any = _Memory(place.back)

    def up() -> None:
        source.seek(0)
        client.upload_fileobj(source, BUCKET, "boto3", Config=config)

    def down() -> None:
        target.seek(0)
        client.download_fileobj(BUCKET, "boto3", target, Config=config)

    return Mover(up=up, down=down)


def botocore_parts(place: Place) -> Mover:
    """Move by plain botocore calls, in the parts, threads and checksums of ours."""
    import boto3
    from botocore.config import Config
    from crc32c import crc32c

    client = boto3.client(
        "s3",
        config=Config(
            max_pool_connections=_THREADS,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"payload_signing_enabled": False},
        ),
    )
    threads = ThreadPoolExecutor(_THREADS)
    key: Any = {"Bucket": BUCKET, "Key": "botocore"}
    starts = range(0, len(place.data), _PART_BYTES)

    def up() -> None:
        upload = client.create_multipart_upload(**key, ChecksumAlgorithm="CRC32C")["UploadId"]

        def send(number: int) -> Any:
            view = memoryview(place.data)[starts[number] :][:_PART_BYTES]
            proof = base64.b64encode(crc32c(view).to_bytes(4, "big")).decode()
            said = client.upload_part(
                **key,
                UploadId=upload,
                PartNumber=number + 1,
                Body=bytes(view),
                ChecksumCRC32C=proof,
            )
            return {"PartNumber": number + 1, "ETag": said["ETag"], "ChecksumCRC32C": proof}

        parts = list(threads.map(send, range(len(starts))))
        client.complete_multipart_upload(**key, UploadId=upload, MultipartUpload={"Parts": parts})

    def fill(start: int) -> None:
        view = memoryview(place.back)[start:][:_PART_BYTES]
        last = start + len(view) - 1
        body: Any = client.get_object(**key, Range=f"bytes={start}-{last}")["Body"]
        while view and (count := body.readinto(view)):
            view = view[count:]
        body.close()

    return Mover(up=up, down=lambda: list(threads.map(fill, starts)))


def obstore_store(place: Place) -> Mover:
    """Move by obstore: up in parts, down in one stream, for it refuses this server's ranges.

    rclone answers a range with the status 200 instead of 206.
    """
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        BUCKET, endpoint=place.endpoint, client_options={"allow_http": True}, region="us-east-1"
    )
    view = memoryview(place.back)

    def down() -> None:
        at = 0
        for chunk in obstore.get(store, "obstore").stream(min_chunk_size=_MB):
            view[at : at + len(chunk)] = memoryview(chunk)
            at += len(chunk)

    return Mover(
        up=lambda: obstore.put(
            store,
            "obstore",
            place.data,
            use_multipart=True,
            chunk_size=_PART_BYTES,
            max_concurrency=_THREADS,
        ),
        down=down,
    )


def rclone_program(place: Place) -> Mover:
    """Move by rclone's own client."""
    env = {
        "RCLONE_CONFIG": os.devnull,
        "RCLONE_CONFIG_THERE_TYPE": "s3",
        "RCLONE_CONFIG_THERE_PROVIDER": "Rclone",
        "RCLONE_CONFIG_THERE_ENV_AUTH": "true",
        "RCLONE_CONFIG_THERE_ENDPOINT": place.endpoint,
    }
    there = f"there:{BUCKET}/rclone"
    command = ["rclone", "copyto", "--ignore-times"]
    return _program(place, env, [*command, "{data}", there], [*command, there, "{back}"])


def s5cmd_program(place: Place) -> Mover:
    """Move by s5cmd, with as many threads."""
    there = f"s3://{BUCKET}/s5cmd"
    command = ["s5cmd", "--endpoint-url", place.endpoint, "cp", "--concurrency", str(_THREADS)]
    return _program(place, {}, [*command, "{data}", there], [*command, there, "{back}"])


def aws_program(place: Place) -> Mover:
    """Move by the AWS CLI."""
    there = f"s3://{BUCKET}/aws"
    command = ["aws", "--endpoint-url", place.endpoint, "s3", "cp", "--only-show-errors"]
    return _program(place, {}, [*command, "{data}", there], [*command, there, "{back}"])


WAYS = (
    Way(name=OURS, opened=ours),
    Way(
        name="boto3 transfer, as it comes",
        opened=lambda place: boto3_transfer(place, tuned=False),
        package="boto3",
    ),
    Way(
        name="boto3 transfer, tuned",
        opened=lambda place: boto3_transfer(place, tuned=True),
        package="boto3",
    ),
    Way(name="botocore, our parts", opened=botocore_parts, package="botocore"),
    Way(name="obstore", opened=obstore_store, package="obstore"),
    Way(name="rclone copyto", opened=rclone_program, program="rclone"),
    Way(name="s5cmd cp", opened=s5cmd_program, program="s5cmd"),
    Way(name="aws s3 cp", opened=aws_program, program="aws"),
)


@dataclass(kw_only=True)
class Row:
    """What one way took, round by round."""

    way: str
    up_s: list[float] = field(default_factory=list)
    down_s: list[float] = field(default_factory=list)
    up_cpu_s: list[float] = field(default_factory=list)
    """Processor time of the client, the server's not counted."""
    down_cpu_s: list[float] = field(default_factory=list)
    extra_mb: float | None = None
    """The most memory over the state, up and down; None if not measured."""

    def cells(self, ours: Row) -> list[str]:
        """Return the row of the table."""
        return [
            self.way,
            *_timed(self.up_s, ours.up_s),
            *_timed(self.down_s, ours.down_s),
            f"{statistics.median(self.up_cpu_s):.2f}",
            f"{statistics.median(self.down_cpu_s):.2f}",
            "" if self.extra_mb is None else f"{self.extra_mb:.0f}",
        ]


def _timed(seconds: list[float], ours: list[float]) -> list[str]:
    ratios = [theirs / own for theirs, own in zip(seconds, ours, strict=True)]
    return [
        f"{statistics.median(seconds):.2f} ({min(seconds):.2f}..{max(seconds):.2f})",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})",
    ]


def measure(ways: Sequence[Way], *, mb: float, rounds: int) -> list[Row]:
    """Return a row for each way; the first round warms up and is not counted."""
    found = {way.name: Row(way=way.title) for way in ways}
    chance = random.Random(0)
    with place_of(mb) as place:
        movers = {way.name: way.opened(place) for way in ways}
        for number in range(rounds + 1):
            for way in chance.sample(ways, len(ways)):
                row, mover = found[way.name], movers[way.name]
                up = _took(mover.up)
                _wipe(place)
                down = _took(mover.down)
                check(place, mover)
                if number:
                    row.up_s.append(up[0])
                    row.up_cpu_s.append(up[1])
                    row.down_s.append(down[0])
                    row.down_cpu_s.append(down[1])
    return list(found.values())


@contextlib.contextmanager
def place_of(mb: float) -> Iterator[Place]:
    """Run the server and make the bytes; the environment says where the server is."""
    with tempfile.TemporaryDirectory(dir=_TMPFS if _TMPFS.is_dir() else None) as name:
        served = Path(name) / "served"
        (served / BUCKET).mkdir(parents=True)
        with rclone_s3(served, *SERVER_FLAGS) as server, _environment(server):
            yield _filled(Path(name), server.endpoint, int(mb * 1e6))


def _filled(folder: Path, endpoint: str, size_bytes: int) -> Place:
    data = bytearray(os.urandom(min(size_bytes, _MB))) * (size_bytes // _MB + 1)
    del data[size_bytes:]
    place = Place(data=data, back=bytearray(data), folder=folder, endpoint=endpoint)
    place.file("data").write_bytes(data)
    return place


@contextlib.contextmanager
def _environment(server: Server) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(server.env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _wipe(place: Place) -> None:
    """Forget what came down before; the memory stays warm."""
    place.back[:] = bytes(len(place.back))
    place.file("back").unlink(missing_ok=True)


def check(place: Place, mover: Mover) -> None:
    """Raise AssertionError unless what came down is what went up."""
    found = place.file("back").read_bytes() if mover.in_file else place.back
    assert zlib.crc32(found) == zlib.crc32(place.data), "the bytes that came down are others"


def _took(act: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds it took, and the processor time of this process and the ended ones."""
    cpu_s, began = _cpu_s(), time.perf_counter()
    act()
    return time.perf_counter() - began, _cpu_s() - cpu_s


def _cpu_s() -> float:
    # The server still runs, so its time is not among the children's.
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


class _Memory(io.RawIOBase):
    """Memory as a file of fixed size, without a copy of its own."""

    def __init__(self, memory: bytearray | memoryview) -> None:
        super().__init__()
        self._view = memoryview(memory)
        self._at = 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        count = min(len(into), len(self._view) - self._at)
        into[:count] = self._view[self._at : self._at + count]
        self._at += count
        return count

    def write(self, data: Any) -> int:
        self._view[self._at : self._at + len(data)] = data
        self._at += len(data)
        return len(data)


def program_path(name: str) -> str | None:
    """Return where a program is: beside this Python, or on the path."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def _program(place: Place, env: dict[str, str], up: list[str], down: list[str]) -> Mover:
    files = {"data": str(place.file("data")), "back": str(place.file("back"))}

    def run(command: list[str]) -> None:
        words = [program_path(command[0]) or command[0], *command[1:]]
        done = subprocess.run(
            [word.format(**files) for word in words],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    return Mover(up=lambda: run(up), down=lambda: run(down), in_file=True)


def extra_mb_of(way: Way, mb: float) -> float | None:
    """Return the peak of a library's memory over the state; None for a program."""
    if way.program:
        return None
    command = [sys.executable, "-m", "benchmarks.object_store", "--mb", str(mb)]
    done = subprocess.run(
        [*command, "--memory-of", way.name], capture_output=True, text=True, check=True
    )
    return float(done.stdout.splitlines()[-1])


def memory_child(name: str, mb: float) -> None:
    """Run in a process of its own: print the peak of memory over the state, in MB."""
    way = next(way for way in WAYS if way.name == name)
    with place_of(mb) as place:
        mover = way.opened(place)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts here
        before = _status_mb("VmRSS")
        mover.up()
        mover.down()
        sys.stdout.write(f"{_status_mb('VmHWM') - before}\n")


def _status_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    line = next(line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * _KB / 1e6


def to_markdown(
    found: Sequence[Row], missing: Sequence[str], machine: dict[str, str], *, mb: float
) -> str:
    """Return the rows as a table, and who is missing from it."""
    header = [
        "way",
        *("up, s (min..max)", "÷ ours", "down, s (min..max)", "÷ ours"),
        *("CPU up, s", "CPU down, s", "MB over the state"),
    ]
    own = next(row for row in found if row.way == OURS)
    lines = [header, ["---"] * len(header), *(row.cells(own) for row in found)]
    table = [f"| {' | '.join(cells)} |" for cells in lines]
    facts = [f"moved: {mb:g} MB", *missing, *(f"{name}: {fact}" for name, fact in machine.items())]
    return "\n".join([*table, "", *(f"- {fact}" for fact in facts)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write it where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.object_store", description=__doc__)
    parser.add_argument("--mb", type=float, default=500, help="to move (500)")
    parser.add_argument("--rounds", type=int, default=7, help="of each way (7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--no-memory", action="store_true", help="leave the memory out")
    parser.add_argument("--memory-of", metavar="WAY", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.memory_of:
        memory_child(given.memory_of, given.mb)
        return
    machine = describe_machine("cpu")
    missing = [said for way in WAYS if (said := way.missing())]
    ways = [way for way in WAYS if not way.missing()]
    found = measure(ways, mb=given.mb, rounds=given.rounds)
    if not given.no_memory:
        for way, row in zip(ways, found, strict=True):
            row.extra_mb = extra_mb_of(way, given.mb)
    text = to_markdown(found, missing, machine, mb=given.mb)
    sys.stdout.write(text)
    if given.markdown:
        given.markdown.write_text(text, encoding="utf-8")
    if given.json:
        body: dict[str, Any] = {
            "schema": 1, "mb": given.mb, "machine": machine, "missing": missing,
            "results": [*map(asdict, found)],
        }  # fmt: skip
        given.json.write_text(json.dumps(body, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
