from __future__ import annotations

import configparser
import fcntl
import importlib
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from spotguard.cli.main import app
from spotguard.launch.wheel import build_wheel
from spotguard.spec.templates import load_controller_node, template_names

ROOT = Path(__file__).parents[3]
CONTROLLER = ROOT / "infra" / "controller"
SERVES = "spotguard controller serve"


def test_the_manifest_is_a_job_of_one_pod_that_serves() -> None:
    """It is begun anew until the run is at rest, as nobody's root, with no key in it."""
    _, job = yaml.safe_load_all((CONTROLLER / "kubernetes.yaml").read_text())
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    assert (job["kind"], pod["restartPolicy"]) == ("Job", "OnFailure")
    [container] = pod["containers"]
    assert {each["name"] for each in container["env"]} == {"RUN", "PRICE", "SPOTGUARD_HOME"}
    assert pod["securityContext"]["runAsNonRoot"] is True
    image = (CONTROLLER / "Containerfile").read_text()
    assert SERVES in image
    assert "\nUSER spotguard\n" in image


def nodes_unit() -> str:
    """Return the unit that the set-up of a node of its own writes there."""
    setup: str = load_controller_node()["setup"]
    unit = setup.split("<<UNIT\n")[1].split("\nUNIT\n")[0]
    given = {"$CONTROLLER_RUN": "s3://b/r", "$(id -un)": "root", "$place": "/root/controller"}
    for name, value in given.items():
        unit = unit.replace(name, value)
    assert "$" not in unit
    return unit


@pytest.mark.parametrize("whose", ["mine", "a node's"])
def test_the_unit_is_one_that_systemd_takes(tmp_path: Path, whose: str) -> None:
    """Nothing in it is unknown to systemd, or misspelt."""
    mine = (CONTROLLER / "spotguard-controller@.service").read_text()
    text = mine if whose == "mine" else nodes_unit()
    judge = shutil.which("systemd-analyze")
    if judge is None:
        pytest.skip("this machine has no systemd-analyze")
    unit = tmp_path / "spotguard-controller@train.service"
    # Who serves is not installed on this machine.
    unit.write_text(text.replace("/opt/spotguard/bin/spotguard", "/bin/true"))
    said = subprocess.run([judge, "verify", unit], capture_output=True, text=True, check=False)
    complaints = [line for line in said.stderr.splitlines() if unit.name in line]
    assert not complaints


def test_what_the_unit_starts_is_in_the_wheel(tmp_path: Path) -> None:
    """Its program is one that an installation has, and takes the words that stand there."""
    mine = (CONTROLLER / "spotguard-controller@.service").read_text()
    line = next(each for each in mine.splitlines() if each.startswith("ExecStart="))
    words = line.removeprefix("ExecStart=").split()
    assert words[:2] == ["/usr/bin/env", "/opt/spotguard/bin/spotguard"]
    with zipfile.ZipFile(build_wheel(tmp_path)) as wheel:
        name = next(each for each in wheel.namelist() if each.endswith("entry_points.txt"))
        points = configparser.ConfigParser()
        points.read_string(wheel.read(name).decode())
        module, _, function = points["console_scripts"]["spotguard"].partition(":")
        assert f"{module.replace('.', '/')}.py" in wheel.namelist()
    assert callable(getattr(importlib.import_module(module), function))
    command: Any = typer.main.get_command(app)
    for word in words[2:4]:
        command = command.commands[word]
    given, *_ = command.make_parser(command.context_class(command)).parse_args(words[4:])
    assert given == {"url": "${RUN}", "price": "${PRICE}"}


def lines_by_section(unit: str) -> dict[str, set[str]]:
    """Return the lines of a systemd unit, without comments, by their section."""
    found: dict[str, set[str]] = {}
    section = ""
    for line in map(str.strip, unit.splitlines()):
        if line.startswith("["):
            section = line
        elif line and not line.startswith("#"):
            found.setdefault(section, set()).add(line)
    return found


def test_both_units_end_and_begin_anew_alike() -> None:
    """On the node, too, what a service leaves behind lives on: the guard that ends the node."""
    mine = (CONTROLLER / "spotguard-controller@.service").read_text()
    setup: str = load_controller_node()["setup"]
    nodes = setup.split("<<UNIT\n")[1].split("\nUNIT\n")[0]
    held = {
        "[Unit]": {
            "Wants=network-online.target",
            "After=network-online.target",
            "StartLimitIntervalSec=0",
        },
        "[Service]": {"Restart=on-failure", "RestartSec=5", "KillMode=process"},
        "[Install]": {"WantedBy=multi-user.target"},
    }
    for unit in (mine, nodes):
        found = lines_by_section(unit)
        for section, lines in held.items():
            assert lines <= found[section]


def test_a_node_has_one_service_though_what_began_it_is_killed(tmp_path: Path) -> None:
    """Its child lives on then; what lives for good keeps no next one from beginning."""
    bash = shutil.which("bash")
    if bash is None or shutil.which("flock") is None:
        pytest.skip("this machine has no bash, or no flock")
    setup: str = load_controller_node()["setup"]
    (tmp_path / "serve.sh").write_text(setup.split("<<'SERVE'\n")[1].split("\nSERVE\n")[0])
    (tmp_path / "environment").write_text(
        f"export HOME={tmp_path} CONTROLLER_BASE={tmp_path} CONTROLLER_SLURM=\n"
        f"export CONTROLLER_PYTHON={tmp_path}/venv/bin/python\n"
    )
    seen = 'ls -l /proc/self/fd | grep -q "/served$" && echo "$0 holds it" >> "$HOME/seen"\n'
    for each in ("skypilot-runtime/bin/sky", "skypilot-runtime/bin/python", "venv/bin/python"):
        path = tmp_path / each
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{bash}\n{seen}exit 0\n")
        path.chmod(0o755)
    serve = [bash, str(tmp_path / "serve.sh")]
    local = tmp_path / ".spotguard" / "controller"
    local.mkdir(parents=True)
    with (local / "served").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert subprocess.run(serve, check=False).returncode == 1
    assert not (tmp_path / "over").exists()
    assert subprocess.run(serve, check=False).returncode == 0
    assert (tmp_path / "over").exists()
    assert (tmp_path / "seen").read_text() == f"{tmp_path}/venv/bin/python holds it\n"


def test_the_nodes_task_is_none_that_a_job_may_take_and_its_scripts_are_bash() -> None:
    """Each script within the set-up is written by it, and begins anew what dies."""
    assert not any("controller" in name for name in template_names())
    task = load_controller_node()
    bash = shutil.which("bash")
    assert bash is not None
    for part in ("setup", "run"):
        said = subprocess.run([bash, "-n"], input=task[part], text=True, check=False)
        assert said.returncode == 0
    setup: str = task["setup"]
    for mark in ("SERVE", "SUPERVISE"):
        script = setup.split(f"<<'{mark}'\n")[1].split(f"\n{mark}\n")[0]
        assert subprocess.run([bash, "-n"], input=script, text=True, check=False).returncode == 0
    assert task["resources"]["autostop"] == {"idle_minutes": 1, "down": True}
