"""Where `benchmarks.recovery` measures: the Slurm lab that is up, or an EC2 lab of its own."""

from __future__ import annotations

import contextlib
import os
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from tests.e2e.ec2 import ec2_lab
from tests.e2e.ec2.ec2_lab import BUCKET, EAST, Ec2Lab
from tests.e2e.lab import slurm_lab
from tests.e2e.lab.scripted_lab import INFRA
from tests.e2e.lab.slurm_lab import SlurmLab

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.e2e.lab.lab_jobs import Lab

SAVE_EVERY = 5
GRACE_S = 10.0
NOTICE_S = 120
BLOWS = {
    "preempted": f"another job takes the node: SIGTERM, and SIGKILL {GRACE_S:g} s later",
    "vanished": "the node dies, and says nothing",
    "notice": f"EC2 takes the node, and says so {NOTICE_S} s before",
    "crash": "the instance's power is cut",
}
_CPUS = "2"
"""All that a node of the Slurm lab has, so that each contestant has one of its own."""
_KIND = "m6i.xlarge"
_GATEWAY = "172.31.0.1"
"""The address of this machine as instances of the EC2 lab see it."""


class Place(Protocol):
    """A lab on which both contestants train."""

    @property
    def blows(self) -> Sequence[str]:
        """What nodes meet here; of `BLOWS`."""
        ...

    @property
    def limit_s(self) -> float:
        """How long it may take until a job trains."""
        ...

    @property
    def environ(self) -> Mapping[str, str]:
        """What SkyPilot's user has in the environment."""
        ...

    @property
    def home(self) -> Path:
        """Of SkyPilot's user."""
        ...

    def sky(self, *words: str) -> str:
        """Run SkyPilot's command line."""
        ...

    def clusters(self) -> list[str]:
        """Return the names of all clusters that live."""
        ...

    def user(self, folder: Path) -> Lab:
        """Return a user's machine."""
        ...

    def flags(self) -> tuple[str, ...]:
        """Return where `spotguard up` shall train."""
        ...

    def trace(self, name: str) -> tuple[Path, str]:
        """Return a new file of a job's lines, and the word by which the job knows it."""
        ...

    def task(self, job: Path, name: str, trace: str) -> dict[str, Any]:
        """Return SkyPilot's task of the plain job."""
        ...

    def strike(self, node: str, blow: str) -> None:
        """Let the node of that host name meet a blow."""
        ...

    def mend(self, node: str, blow: str) -> None:
        """Let there be as many nodes as before."""
        ...


class OnSlurm:
    """The Slurm lab that is up in $SPOTLAB_DIR."""

    blows = ("preempted", "vanished")
    limit_s = 240.0

    def __init__(self) -> None:
        self._lab = SlurmLab(Path(os.environ["SPOTLAB_DIR"]), ours=False)
        self._lab.up()
        self._lab.calm()
        self.environ = self._lab.environ
        self.home = self._lab.folder / "home"
        self._shared = self._lab.folder / "shared"

    def sky(self, *words: str) -> str:
        """Run SkyPilot's command line."""
        return self._lab.sky(*words)

    def clusters(self) -> list[str]:
        """Return the names of the clusters that Slurm has not ended."""
        return self._lab.clusters()

    def user(self, folder: Path) -> Lab:
        """Return a user's machine, whose runs take whole nodes."""
        beside = slurm_lab.Beside(folder, self._lab)
        (beside.work / "spotguard.toml").write_text(f'[node]\ncpus = "{_CPUS}"\n')
        return beside

    def flags(self) -> tuple[str, ...]:
        """Return the partition of spot nodes."""
        return ("--infra", "slurm/spotlab/spot")

    def trace(self, name: str) -> tuple[Path, str]:
        """Return a file on the disk that all nodes share."""
        path = self._shared / f"{name}.jsonl"
        return path, str(path)

    def task(self, job: Path, name: str, trace: str) -> dict[str, Any]:
        """Return the task of a job that lies, and saves, on the shared disk."""
        script = self._shared / f"{name}.py"
        script.write_text(job.read_text())
        checkpoint = self._shared / f"{name}.pt"
        command = f"exec {sys.executable} {script} {trace} --plain {checkpoint}"
        return {
            "resources": {"infra": "slurm/spotlab/spot", "cpus": _CPUS},
            "run": f"{command} --save-every {SAVE_EVERY}",
        }

    def strike(self, node: str, blow: str) -> None:
        """Let another job take the node, or kill it."""
        if blow == "preempted":
            self._lab.verb("preempt", node, grace_s=GRACE_S)
        else:
            self._lab.verb("kill", node)

    def mend(self, node: str, blow: str) -> None:
        """Give the node back."""
        self._lab.verb(*(("release",) if blow == "preempted" else ("heal", node)))


class OnEc2:
    """An EC2 lab, of whose nodes each contestant has one."""

    blows = ("notice", "crash")
    limit_s = 900.0

    def __init__(self, folder: Path, *, warm: bool) -> None:
        """Bring it up; it comes down with this process at the latest.

        `warm`: nodes are of an image that `infra/warm-image` makes there, instead of a plain one.
        """
        self._folder = folder
        self._lab = Ec2Lab(folder / "lab", os.getpid())
        self._lab.up()
        self.environ = self._lab.environ
        self.home = Path(self.environ["HOME"])
        self._image = self._make_image() if warm else ""

    def _make_image(self) -> str:
        made = subprocess.run(
            [INFRA / "warm-image" / "build_aws.sh", EAST, _KIND],
            env=self.environ,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return made.stdout.split()[-1]

    def down(self) -> None:
        """Take it away."""
        self._lab.down()

    def sky(self, *words: str) -> str:
        """Run SkyPilot's command line."""
        return self._lab.sky(*words)

    def clusters(self) -> list[str]:
        """Return the names of all instances that live."""
        return [each.name for each in self._lab.living()]

    def user(self, folder: Path) -> Lab:
        """Return a user's machine, whose runs are kept in S3."""
        beside = ec2_lab.Beside(folder, self._lab)
        image = f'image = "{self._image}"\n' if self._image else ""
        (beside.work / "spotguard.toml").write_text(f'[node]\ninstance_type = "{_KIND}"\n{image}')
        return beside

    def flags(self) -> tuple[str, ...]:
        """Return our region."""
        return ("--infra", f"aws/{EAST}", "--budget", "9")

    def trace(self, name: str) -> tuple[Path, str]:
        """Return a file to which the lines are written that come to a port of this machine."""
        path = self._folder / f"{name}.jsonl"
        return path, f"tcp:{_GATEWAY}:{_listen(path)}"

    def task(self, job: Path, name: str, trace: str) -> dict[str, Any]:
        """Return the task of a job that saves in S3; the script comes with the command."""
        command = f"exec ~/sky-user-env/bin/python ~/job.py {trace} --plain s3://{BUCKET}/{name}.pt"
        return {
            "resources": {
                **({"image_id": self._image} if self._image else {}),
                "infra": f"aws/{EAST}",
                "instance_type": _KIND,
                "use_spot": True,
            },
            "envs": {"AWS_ENDPOINT_URL": f"http://{_GATEWAY}:5566"},
            "run": f"cat > ~/job.py <<'JOB'\n{job.read_text()}\nJOB\n"
            f"{command} --save-every {SAVE_EVERY}",
        }

    def strike(self, node: str, blow: str) -> None:
        """Give the instance of that host name its notice, or cut its power."""
        address = node.removeprefix("ip-").replace("-", ".")
        (struck,) = (each for each in self._lab.living() if each.private_ip == address)
        words = (
            ("interrupt", struck.id, str(NOTICE_S)) if blow == "notice" else ("crash", struck.id)
        )
        self._lab.verb(*words)

    def mend(self, node: str, blow: str) -> None:
        """There are more instances where it came from."""


def _listen(path: Path) -> int:
    """Append to a file what comes to a new port; return the port."""

    class ToFile(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            line = self.rfile.readline()
            with path.open("ab") as file:
                file.write(line)

    server = socketserver.TCPServer((_GATEWAY, 0), ToFile)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])


@contextlib.contextmanager
def managed_jobs(place: Place) -> Iterator[None]:
    """Let SkyPilot's server control managed jobs itself, instead of on a machine of their own."""
    path = place.home / ".sky" / "config.yaml"
    before = path.read_text() if path.exists() else ""
    config = yaml.safe_load(before) or {}
    config["jobs"] = {"controller": {"consolidation_mode": True}}
    path.write_text(yaml.safe_dump(config))
    try:
        _restart(place)
        yield
    finally:
        path.write_text(before)
        _restart(place)


def _restart(place: Place) -> None:
    place.sky("api", "stop")
    time.sleep(1.0)
    place.sky("api", "start")
