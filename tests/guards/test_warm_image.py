"""`infra/warm-image`: no login is in an image, and nothing goes on costing money unsaid."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parents[2] / "infra" / "warm-image"
_BUILD, _CLEAN = _FOLDER / "build_aws.sh", _FOLDER / "clean_node.sh"
_SECRET = "the key of a cloud"
_SKY = """
case "$1" in
launch) for last; do :; done; cp "$last" "$WORLD/task"; echo i-1 > "$WORLD/instances" ;;
down) if [ -s "$WORLD/refusals" ]; then sed -i 1d "$WORLD/refusals"
  else : > "$WORLD/instances"; fi ;;
esac
"""
"""As SkyPilot's own, `down` says by no exit code that it failed."""
_AWS = """
case "$2" in
describe-instances) [ ! -e "$WORLD/blind" ] || [ ! -e "$WORLD/task" ] || exit 255
  cat "$WORLD/instances" ;;
create-image) echo ami-1 ;;
describe-images) mapfile -t states < "$WORLD/states"; echo "${states[0]}"
  [ "${#states[@]}" = 1 ] || printf '%s\n' "${states[@]:1}" > "$WORLD/states" ;;
esac
"""
_SUDO = """
: "${ROOT:?}"
for word; do case "$word" in
"$ROOT"/* | [!/]*) ;;
*) echo "not here: $word" >&2; exit 99 ;;
esac; done
exec "$@"
"""
"""For what removes things: it touches nothing outside the test's folder."""
_CURL = """
[ ! -e "$WORLD/gone" ] || exit 28
[ ! -e "$WORLD/empty" ] || exit 0
case "$*" in
*' -X PUT -H X-aws-ec2-metadata-token-ttl-seconds: '*/latest/api/token) echo a-token ;;
*' -H X-aws-ec2-metadata-token: a-token '*/latest/meta-data/instance-id) echo i-1 ;;
*) exit 22 ;;
esac
"""
"""EC2's metadata service, which answers nobody without a token of its own."""


class World:
    """Programs in the place of those that would cost money, and what they were asked, in order."""

    def __init__(self, folder: Path, **programs: str) -> None:
        self.folder = folder
        self._bin = folder / "bin"
        self._bin.mkdir(parents=True)
        (folder / "told").touch()
        (folder / "instances").touch()
        (folder / "states").write_text("available\n")
        self.program("python3", f'exec {sys.executable} "$@"')
        for name, script in programs.items():
            self.program(name, f'echo "{name} $*" >> "$WORLD/told"\n{script}')

    def program(self, name: str, script: str) -> None:
        """Put a program before the machine's own."""
        path = self._bin / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def run(
        self, script: Path, *words: str, stdin: str = "", **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run one of the folder's scripts to its end."""
        path = f"{self._bin}:{os.environ['PATH']}"
        return subprocess.run(
            [script, *words],
            input=stdin,
            env={**os.environ, "PATH": path, "WORLD": str(self.folder), **environ},
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def told(self) -> list[str]:
        """What the programs were asked."""
        return (self.folder / "told").read_text().splitlines()

    def asked(self, words: str) -> int:
        """Return when the one call was made that begins so."""
        (place,) = (at for at, line in enumerate(self.told) if line.startswith(words))
        return place


@pytest.fixture
def aws(tmp_path: Path) -> World:
    """An AWS in which all goes well."""
    return World(tmp_path, sky=_SKY, aws=_AWS, sleep="", ssh='cat > "$WORLD/ssh"')


def build(world: World, *requirements: str) -> subprocess.CompletedProcess[str]:
    """Make an image."""
    home = str(world.folder)
    return world.run(_BUILD, "us-east-1", "m6i.xlarge", *requirements, HOME=home)


def test_an_image_is_made_of_a_clean_disk(aws: World) -> None:
    """Its id alone is on stdout, and the instance is ended."""
    done = build(aws, "transformers")
    assert (done.returncode, done.stdout) == (0, "ami-1\n"), done.stderr
    assert (aws.folder / "ssh").read_text() == _CLEAN.read_text()
    assert aws.told[aws.asked("ssh")].endswith(" bash -s -- i-1"), "no other machine is cleaned"
    assert aws.asked("ssh") < aws.asked("aws ec2 create-image") < aws.asked("sky down")
    assert "costs money" not in done.stderr


def test_an_instance_ends_though_this_machine_is_gone(aws: World) -> None:
    """From its set-up on; once SkyPilot cannot end it, by a shutdown that no reboot forgets."""
    build(aws)
    launch = aws.told[aws.asked("sky launch")]
    assert " -i 10 --down " in launch
    commands = (aws.folder / "task").read_text().split("setup: |\n")[1].splitlines()
    assert commands[1].strip() == "sudo shutdown -P +120"
    ends = aws.asked("aws ec2 modify-instance-attribute")
    assert aws.told[ends].endswith("instanceInitiatedShutdownBehavior --value terminate")
    assert ends < aws.asked("ssh")
    assert "--no-reboot" in aws.told[aws.asked("aws ec2 create-image")]


def test_an_end_that_fails_is_asked_for_again(aws: World) -> None:
    """Until EC2 says that nothing is left."""
    (aws.folder / "refusals").write_text("no\n" * 3)
    assert build(aws).returncode == 0
    assert sum(line.startswith("sky down") for line in aws.told) == 4


@pytest.mark.parametrize(("blind", "left"), [(False, "i-1"), (True, "INSTANCE_ID")])
def test_an_instance_that_stays_is_said(aws: World, blind: bool, left: str) -> None:
    """With what ends it by hand, and by the exit code; also where EC2 does not answer."""
    (aws.folder / "refusals").write_text("no\n" * 99)
    if blind:
        (aws.folder / "blind").touch()
    done = build(aws)
    assert done.returncode == 1
    assert "MAY STILL COST MONEY" in done.stderr
    assert "\n  sky down -y spotguard-image-" in done.stderr
    assert f"terminate-instances --region us-east-1 --instance-ids {left}\n" in done.stderr


def test_nothing_is_launched_whose_end_could_not_be_seen(aws: World) -> None:
    """A login without the right to see instances is told before anything costs money."""
    aws.program("aws", "exit 255")
    assert build(aws).returncode == 255
    assert not any(line.startswith("sky launch") for line in aws.told)


def test_packages_that_do_not_work_fail_the_job(aws: World) -> None:
    """What comes after the trial of them does not hide it."""
    build(aws)
    run = (aws.folder / "task").read_text().split("run: |\n")[1]
    script = aws.folder / "run"
    script.write_text(f"#!/bin/bash\n{run}")
    script.chmod(0o755)
    assert aws.run(script, HOME=str(aws.folder)).returncode != 0


def test_no_image_is_made_of_a_disk_that_is_not_clean(aws: World) -> None:
    """And the instance is ended."""
    aws.program("ssh", "exit 255")
    assert build(aws).returncode == 255
    assert not any("create-image" in line for line in aws.told)
    assert (aws.folder / "instances").read_text() == ""


def test_an_image_may_take_longer_than_aws_waits(aws: World) -> None:
    """`aws ec2 wait` gives up after 40 looks."""
    (aws.folder / "states").write_text("pending\n" * 100 + "available\n")
    done = build(aws)
    assert (done.returncode, done.stdout) == (0, "ami-1\n")


@pytest.mark.parametrize("state", ["failed", "pending"])
def test_an_image_that_does_not_come_is_said(aws: World, state: str) -> None:
    """By its id, with what removes it and its snapshots."""
    (aws.folder / "states").write_text(f"pending\n{state}\n")
    done = build(aws)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"ami-1 is {state}" in done.stderr
    assert "deregister-image --region us-east-1 --image-id ami-1\n" in done.stderr
    assert "xargs -rn1 aws ec2 delete-snapshot --region us-east-1 --snapshot-id\n" in done.stderr
    assert (aws.folder / "instances").read_text() == ""


@pytest.fixture
def node(tmp_path: Path) -> World:
    """A node's programs; `sudo` refuses whatever is not in the test's folder."""
    quiet = dict.fromkeys(("shutdown", "pkill", "cloud-init", "sync"), "")
    world = World(tmp_path / "world", **quiet)
    world.program("sudo", _SUDO)
    world.program("curl", _CURL)
    for path in ("root", "tmp", "var/tmp", "var/log/journal/1", "etc/ssh", "home"):
        (tmp_path / path).mkdir(parents=True)
    return world


def put(path: Path, text: str = _SECRET) -> Path:
    """Write a file, and the folders that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def clean(
    node: World, instance: str = "i-1", text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Clean what stands for a node's disk, as over SSH."""
    root = str(node.folder.parent)
    said = _CLEAN.read_text() if text is None else text
    words = ("-s", "--", instance, root)
    return node.run(Path("/bin/bash"), *words, stdin=said, HOME="/home", ROOT=root)


def files(folder: Path) -> list[str]:
    """Return all that is not a folder."""
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if not each.is_dir())


_LOGINS = (
    *(".aws/credentials", ".config/gcloud/credentials.db", ".azure/msal_token_cache.json"),
    *(".kube/config", ".oci/config", ".lambda_cloud/lambda_keys", ".cloudflare/r2.credentials"),
    *(".cache/huggingface/token", ".ssh/sky-cluster-key", ".ssh/authorized_keys", ".netrc"),
    *(".sky/sky_ray.yml", ".sky/config.yaml", ".local/share/cloud/token", ".local/state/key"),
    *(".local/share/uv/credentials/all.toml", ".bash_history", ".python_history"),
    *(".tomorrows-cloud/key", "sky_logs/run.log", "sky_workdir/.env", ".spotguard/wheels/a.whl"),
)


@pytest.mark.parametrize(
    ("instance", "service"),
    [("", ""), ("i-2", ""), ("", "gone"), ("i-1", "gone"), ("", "empty"), ("i-1", "empty")],
)
def test_no_other_machine_is_touched(node: World, instance: str, service: str) -> None:
    """Started by hand it deleted its caller's home; nor can it be started by its name."""
    kept = put(node.folder.parent / "home/thesis.tex")
    this = {"": "i-1", "gone": "no instance of EC2", "empty": ""}[service]
    if service:
        (node.folder / service).touch()
    done = clean(node, instance)
    assert (done.returncode, node.told) == (2, [])
    assert done.stderr == (
        f"clean_node.sh: shall clean '{instance}', and this is {this}: nothing was touched\n"
    )
    assert kept.exists()
    assert not os.access(_CLEAN, os.X_OK)


def test_no_login_is_in_an_image(node: World) -> None:
    """Neither of a cloud that SkyPilot knows, nor of one that it will know; nor root's."""
    root = node.folder.parent
    for name in _LOGINS:
        put(root / "home" / name)
    for name in ("root/.aws/credentials", "root/.bash_history", "root/.ssh/authorized_keys"):
        put(root / name)
    for name in ("tmp/ray_skypilot/key", "tmp/.hidden", "var/tmp/key"):
        put(root / name)
    assert clean(node).returncode == 0
    assert [files(root / folder) for folder in ("home", "root", "tmp", "var/tmp")] == [[]] * 4


def test_what_a_node_would_install_stays(node: World) -> None:
    """SkyPilot finds its runtime and the mark of its wheel, and a job its packages."""
    root = node.folder.parent
    kept = (
        *(".bashrc", ".profile", ".local/bin/uv", ".local/share/uv/python/3.10/bin/python3"),
        *(".sky/wheels/current_sky_wheel_hash", ".sky/wheels/0f/skypilot.whl"),
        *("skypilot-runtime/bin/ray", "sky-user-env/bin/python", "miniconda3/bin/conda"),
    )
    for name in kept:
        put(root / "home" / name, "")
    put(root / "root/.bashrc", "")
    assert clean(node).returncode == 0
    assert files(root / "home") == sorted(kept)
    assert files(root / "root") == [".bashrc"]


def test_a_removed_login_is_in_no_block_of_the_disk(node: World) -> None:
    """It is overwritten first; a package's file that is in uv's cache as well is not."""
    home = node.folder.parent / "home"
    login = put(home / ".aws/credentials")
    package = put(home / "sky-user-env/lib/a.py", "a = 1")
    (home / ".cache/uv").mkdir(parents=True)
    os.link(package, home / ".cache/uv/a.py")
    with login.open("rb") as blocks:
        assert clean(node).returncode == 0
        assert _SECRET.encode() not in blocks.read()
    assert not login.exists()
    assert package.read_text() == "a = 1"


def test_what_makes_an_instance_itself_goes(node: World) -> None:
    """Host keys, logs and the machine's id: a new one makes its own."""
    root = node.folder.parent
    for name in ("etc/ssh/ssh_host_rsa_key", "var/log/auth.log", "var/log/journal/1/a.journal"):
        put(root / name)
    for name in ("etc/machine-id", "etc/ssh/sshd_config"):
        put(root / name)
    assert clean(node).returncode == 0
    assert files(root / "etc") == ["machine-id", "ssh/sshd_config"]
    assert (root / "etc/machine-id").read_text() == ""
    assert files(root / "var/log") == []
    assert "cloud-init clean --logs" in node.told


def test_the_node_ends_by_itself_before_skypilot_cannot_end_it(node: World) -> None:
    """There is no moment at which nothing would."""
    assert clean(node).returncode == 0
    assert node.told[:2] == ["shutdown -P +120", "pkill -KILL -f sky.skylet.skylet"]


def test_half_of_the_cleaning_does_nothing(node: World) -> None:
    """It comes by SSH, which may break off."""
    text = _CLEAN.read_text()
    half = text[: text.index('keep "$root/tmp"')]
    assert clean(node, text=half).returncode != 0
    assert node.told == []
