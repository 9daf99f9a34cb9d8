"""The tables of a job's settings: what the local cloud does, what a node is, what a smoke may do.

The string under each field is its documentation, as in `job`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from spotguard.spec.infra import CLOUDS, at_least, image_name, machine_name, mounts, volume_names
from spotguard.spec.setting import (
    IfGiven,
    OneOf,
    Setting,
    Whole,
    duration,
    number,
    text,
    texts,
)

SMOKES = ("paid", "always", "never")
DURATION = 'a duration above 0, such as 90, "90s", "1h30m" or "2d"'


class Frozen(BaseModel):
    """What nobody can change, and holds no other field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class LocalSpec(Frozen):
    """What the local cloud, made of this machine's processes, does to the run."""

    metadata: Annotated[
        str,
        Setting(
            parse=OneOf(CLOUDS),
            allowed="aws, gcp or azure",
            example='"gcp"',
            flag="--metadata",
            # SPOTGUARD_METADATA is what a launcher tells a job, with an address in it.
            variable="SPOTGUARD_LOCAL_METADATA",
            choices=CLOUDS,
        ),
    ] = "aws"
    """Whose metadata service the local nodes have: its protocol and its grace times."""

    interrupt: Annotated[
        tuple[str, ...],
        Setting(
            parse=texts,
            allowed="interruptions, such as 'node=1@step=40:notice'",
            example='["node=1@step=40:notice", "node=0@step=90:kill"]',
            flag="--interrupt",
        ),
    ] = ()
    """Interruptions to play, each once in a run: `TARGET@WHEN:HOW`, HOW being `notice`, `term`,
    `kill` or `reclaim-all`; or `capacity=1@step=60` to have one node only from then on."""

    mtbf_s: Annotated[
        float | None,
        Setting(
            parse=IfGiven(duration),
            allowed=DURATION,
            example='"60s"',
            key="mtbf",
            flag="--mtbf",
            is_duration=True,
        ),
    ] = None
    """Mean time between random interruptions. Without it there are none."""

    interrupt_seed: Annotated[
        int,
        Setting(
            parse=Whole(0), allowed="a whole number from 0", example="7", flag="--interrupt-seed"
        ),
    ] = 0
    """Seed of the random interruptions: the same seed, the same times."""

    trace: Annotated[
        str | None,
        Setting(
            parse=IfGiven(text),
            allowed="the path of a recorded trace",
            example='"traces/us-east-2a.json"',
            flag="--trace",
            is_path=True,
        ),
    ] = None
    """A recorded trace of capacity and prices to replay."""

    speed_up: Annotated[
        float,
        Setting(parse=number, allowed="a number above 0", example="60.0", flag="--speed-up"),
    ] = 1.0
    """How much faster than in reality traces run and grace times pass."""


class NodeSpec(Frozen):
    """What a node from SkyPilot is, and how it is made ready. All but `gpus` is rarely needed."""

    instance_type: Annotated[
        str | None,
        Setting(
            parse=IfGiven(machine_name),
            allowed="the name of an instance type of the cloud",
            example='"p4d.24xlarge"',
        ),
    ] = None
    """The machine, by its cloud's own name. Default: the cheapest that has what is asked for."""

    cpus: Annotated[
        str | None,
        Setting(parse=IfGiven(at_least), allowed="a number, or one with '+'", example='"8+"'),
    ] = None
    """Virtual CPUs of a node: so many, or with '+' at least. Default: the template's."""

    memory: Annotated[
        str | None,
        Setting(parse=IfGiven(at_least), allowed="a number, or one with '+'", example='"32+"'),
    ] = None
    """Main memory of a node in GiB: so much, or with '+' at least."""

    disk_gb: Annotated[
        int | None,
        Setting(
            parse=IfGiven(Whole(10, 65536)),
            allowed="a whole number from 10 to 65536",
            example="256",
        ),
    ] = None
    """Size of a node's disk in GB. Default: the template's."""

    image: Annotated[
        str | None,
        Setting(
            parse=IfGiven(image_name),
            allowed="an image of the cloud, or docker:NAME",
            example='"docker:pytorch/pytorch:latest"',
            flag="--image",
        ),
    ] = None
    """The image that nodes start from. Default: SkyPilot's own. Its torch is used, if any."""

    setup: Annotated[
        tuple[str, ...],
        Setting(
            parse=texts,
            allowed="shell commands",
            example='["sudo apt-get install -y jq"]',
            flag="--setup",
        ),
    ] = ()
    """Commands of yours that make a node ready, before Python's packages are installed. They are
    kept in the run store: no secrets; variables from `env` are set while they run."""

    file_mounts: Annotated[
        dict[str, str],
        Setting(
            parse=mounts,
            allowed="places on a node, absolute or below ~/, and for each a bucket (s3://, gs://, "
            "r2://, https://ACCOUNT.blob.core.windows.net/) or a file or folder of this machine; "
            "no blanks or quotes in the former",
            example='{ "/data" = "s3://my-bucket/data", "~/words" = "./words" }',
            flag="--file-mount",
            is_path=True,
        ),
    ] = Field(default_factory=dict)
    """What nodes find where, beside the workdir: buckets are mounted there, files and folders of
    this machine are copied at each launch."""

    volumes: Annotated[
        dict[str, str],
        Setting(
            parse=volume_names,
            allowed="places on a node, absolute or below ~/, and for each the name of a volume",
            example='{ "/mnt/data" = "my-volume" }',
            flag="--volume",
        ),
    ] = Field(default_factory=dict)
    """Volumes of SkyPilot's (`sky volumes apply`), by where nodes find them."""

    requirements: Annotated[
        str | None,
        Setting(
            parse=IfGiven(text),
            allowed="the path of a requirements file below the workdir",
            example='"requirements.txt"',
            is_path=True,
        ),
    ] = None
    """What to install on nodes. Default: the `dependencies` of the script's own PEP 723 block."""


class SmokeSpec(Frozen):
    """How the script is tried on this machine's CPU before anything is paid for."""

    when: Annotated[
        str,
        Setting(
            parse=OneOf(SMOKES),
            allowed="paid, always or never",
            example='"never"',
            choices=SMOKES,
        ),
    ] = "paid"
    """When `up` first tries the script as one process on this machine's CPU: before nodes that cost
    money are asked for, always, or never. What passed is not tried again while the script, the
    files that it imports from beside it, what is installed, arguments and variables stay the same.
    On the command line `--smoke` is always, also for `plan`, and `--no-smoke` never."""

    steps: Annotated[
        int,
        Setting(
            parse=Whole(1, 1000),
            allowed="a whole number from 1 to 1000",
            example="2",
            flag="--smoke-steps",
        ),
    ] = 2
    """Steps that the smoke trains before it saves; one more follows after it has restored."""

    limit_s: Annotated[
        float,
        Setting(
            parse=duration,
            allowed=DURATION,
            example='"5m"',
            key="limit",
            flag="--smoke-limit",
            is_duration=True,
        ),
    ] = 50.0
    """How long all of the smoke may take. A script that waits by then, or whose own lines have not
    come to the loop, is not launched; work of a library and downloads prove nothing."""

    upload_mb_per_s: Annotated[
        float,
        Setting(parse=number, allowed="a number above 0", example="800"),
    ] = 250.0
    """What a node writes into the store in a second, in MB, by which the smoke tells whether an
    emergency save fits the cloud's notice. `spotguard doctor STORE`, run on a node, measures it."""
