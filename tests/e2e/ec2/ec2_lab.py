"""The EC2 lab as tests use it: its verbs and its books, and a user's machine beside it."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.e2e.lab import lab_jobs
from tests.e2e.lab.scripted_lab import INFRA, BucketMachine, ScriptedLab, output
from tests.e2e.lab.sky_api import start_api

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = INFRA / "ec2-lab" / "ec2_lab.sh"
BUCKET, GUARDED = "runs", "guarded"
"""Buckets; for the second one's a policy may be asked for."""
EAST, WEST, OHIO, IRELAND = ("us-east-1", "us-west-2", "us-east-2", "eu-west-1")
"""Regions; each but the last has two zones."""
WARM_IMAGE = "ami-0ec21ab0ec21ab001"
"""As `infra/warm-image` makes them; without one, nodes are of SkyPilot's own default image."""
_ADMIN_KEY = "AKIAEC2LABADMINADMIN"
_LIVE = ("pending", "running", "shutting-down", "stopping", "stopped")

wait_until = partial(lab_jobs.wait_until, every_s=4.0)
"""Each look is a command: more of them would take the cores from what they wait for."""


def zones(region: str) -> tuple[str, str]:
    """Return the zones of a region that have machines."""
    return f"{region}a", f"{region}b"


@dataclass(frozen=True, kw_only=True)
class Instance:
    """What EC2's own books say of one instance."""

    id: str
    name: str
    """Its Name tag, which has SkyPilot's name of the cluster in it."""
    state: str
    reason: str
    zone: str
    market: str
    private_ip: str
    begin_at: float
    end_at: float | None
    usd: float
    """What EC2 charges, each hour at the price that held as it began; 0 while it lives."""

    @property
    def lives(self) -> bool:
        """True unless it is gone for good."""
        return self.state in _LIVE


class Ec2Lab(ScriptedLab):
    """A running lab."""

    script = SCRIPT
    prefix = "EC2LAB"

    def up(self) -> None:
        """Start EC2, SkyPilot's API server, and the buckets that runs are kept in."""
        self.verb("up", timeout_s=1500.0)
        self.join()
        with ThreadPoolExecutor() as together:
            served = together.submit(start_api, self)  # else a child of the first controller
            for bucket in (BUCKET, GUARDED):
                self.aws("s3", "mb", f"s3://{bucket}")
            served.result()
        self.sky("check", "aws")

    def sky_names(self) -> list[str]:
        """Return the names of the clusters that SkyPilot has in its books."""
        code = "import sky; print('names', *(c['name'] for c in sky.get(sky.status())))"
        printed = output([sys.executable, "-c", code], self.environ, 200.0)
        return next(x for x in printed.splitlines() if x.startswith("names")).split()[1:]

    def aws(self, *words: str) -> str:
        """Run AWS' command line as an administrator, who meets no faults."""
        key = {"AWS_ACCESS_KEY_ID": _ADMIN_KEY, "AWS_SECRET_ACCESS_KEY": "ec2lab"}
        return output(["aws", *words], {**self.environ, **key}, 200.0)

    def instances(self, run: str = "") -> list[Instance]:
        """Return each instance that ever was of a run, or of all, oldest first."""
        return [
            Instance(
                id=each["id"],
                name=each["name"],
                state=each["state"],
                reason=each["reason"] or "",
                zone=each["zone"],
                market=each["market"],
                private_ip=each["ip"],
                begin_at=each["billed"][0][0],
                end_at=each["billed"][-1][1],
                usd=each["usd"],
            )
            for each in json.loads(self.verb("books"))
            if run in each["name"]
        ]

    def living(self, run: str = "") -> list[Instance]:
        """Return the instances that are not gone for good."""
        return [each for each in self.instances(run) if each.lives]

    def calls(self) -> list[dict[str, Any]]:
        """Return each AWS call that was made, but an administrator's."""
        found: list[dict[str, Any]] = json.loads(self.verb("calls"))
        return found

    def events(self) -> list[str]:
        """Return what happened, a line each."""
        return self.verb("events").splitlines()

    def calm(self, runs: list[str], regions: set[str]) -> None:
        """Take back capacity and faults of some regions, and end what is left of some runs."""
        for region in regions:
            self.verb("calm", region)
        left = [name for name in self.sky_names() if any(run in name for run in runs)]
        if left:
            self.sky("down", "-y", *left)
        wait_until(
            lambda: not any(self.living(run) for run in runs),
            "no instance is left",
            timeout_s=200.0,
        )


class Beside(BucketMachine):
    """A user's machine that can reach the lab; its runs are kept in S3."""

    def __init__(self, folder: Path, ec2: Ec2Lab) -> None:
        super().__init__(folder, ec2, BUCKET)
        self.ec2 = ec2
        self.runs: list[str] = []
        self.places: set[str] = set()

    def begin(
        self,
        job: Path,
        *flags: str,
        args: tuple[str, ...],
        region: str = EAST,
        image: str = WARM_IMAGE,
    ) -> str:
        """Start a run and return its id."""
        settings = self.work / "spotguard.toml"
        settings.write_text(f'[node]\nimage = "{image}"\n' if image else "")
        infra = f"aws/{region}"
        self.places.add(infra)
        run = self.start_at(infra, job, *flags, args=args)
        self.runs.append(run)
        return run
