"""One instance as a Linux node of this machine: its namespaces, its link, its metadata, its end."""

from __future__ import annotations

import base64
import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import journal
import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from moto.ec2.models.instances import Instance

STATES = {
    "pending": 0,
    "running": 16,
    "shutting-down": 32,
    "terminated": 48,
    "stopping": 64,
    "stopped": 80,
}
LIVE = ("pending", "running")
_POWER_OFF_S = 25.0
"""A node that is told to shut down has so long."""
lock = threading.RLock()
nodes: dict[str, Node] = {}
"""By instance id; the dead ones stay, as EC2's own list keeps them for a while."""


def set_state(instance: Instance, name: str, reason: str = "") -> None:
    """Give an instance a state, and say so."""
    instance._state.name, instance._state.code = name, STATES[name]
    if reason:
        instance.state_reason.code = instance.state_reason.message = reason
    journal.note(f"{instance.id} {name} {reason}")


def market_of(instance: Instance) -> str:
    """Return `spot` or `on-demand`."""
    return "spot" if instance.lifecycle == "spot" else "on-demand"


def chosen(wanted: str) -> Iterator[Node]:
    """Yield the live nodes that an id, an address, a part of the Name tag, or `all` means."""
    for node in list(nodes.values()):
        instance = node.instance
        own = ("all", instance.id, instance.private_ip, instance.public_ip)
        if node.alive and (wanted in own or wanted in node.name):
            yield node


class Node:
    """The namespaces of one instance."""

    def __init__(self, instance: Instance, end_instance: Callable[[Instance], Any]) -> None:
        """`end_instance` is moto's own Terminate, for one that has ended by itself."""
        self.instance = instance
        self.id = instance.id
        self.short = instance.id[2:12]
        self.here = settings.DATA / "nodes" / self.id
        self.disk = settings.DATA / "disks" / self.id
        self.process: subprocess.Popen[bytes] | None = None
        self.launched_at = time.time()
        self.billed: list[list[float | None]] = []
        """When it began and ceased to cost, as EC2 counts: once for each time that it ran."""
        self._end_instance = end_instance
        self.here.mkdir()
        self.disk.mkdir()

    @property
    def alive(self) -> bool:
        """True while its processes run."""
        return self.process is not None and self.process.poll() is None

    @property
    def name(self) -> str:
        """Its Name tag."""
        tags = self.instance.get_tags()
        return next((tag["value"] for tag in tags if tag["key"] == "Name"), "")

    def boot(self) -> None:
        """Give it a link and its first process; returns before it serves."""
        instance = self.instance
        host = "ip-" + instance.private_ip.replace(".", "-")
        (self.here / "pid").unlink(missing_ok=True)
        self._write_orders(host)
        self.tell(self._metadata(host))
        network = self._make_link()
        self.billed.append([time.time(), None])
        inside = ("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child")
        script = settings.INFRA / "ec2-lab" / "node" / "node.sh"
        with (self.here / "console").open("ab") as console:
            self.process = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{network}", *inside, "bash", script, self.here],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                start_new_session=True,
            )
        threading.Thread(target=self._watch, args=(self.process,), daemon=True).start()
        where = f"{instance.placement.zone} {market_of(instance)}"
        journal.note(f"{self.id} boots: {where} {instance.private_ip} {instance.public_ip}")

    def _write_orders(self, host: str) -> None:
        instance = self.instance
        made = settings.IMAGES / str(instance.image_id)
        values = {
            "NAME": host,
            "IP": instance.private_ip,
            "DISK": str(self.disk),
            "REGION": instance.region_name,
            "ENDPOINT": f"http://{settings.ADDRESS}:{settings.PORT}",
            "IMAGE": str(settings.IMAGE),
            "MADE": str(made) if made.is_dir() else "",
            "PLAIN": "yes" if instance.image_id == settings.AMI else "",
            "INFRA": str(settings.INFRA),
            "PYTHON": "/home/ubuntu/sky-user-env/bin/python",
        }
        lines = (f"{key}={shlex.quote(value)}\n" for key, value in values.items())
        (self.here / "vars").write_text("".join(lines))
        data = str(instance.user_data or "")
        plain = data.encode() if data.startswith("#") else base64.b64decode(data)
        (self.here / "userdata").write_bytes(plain)

    def _metadata(self, host: str) -> dict[str, Any]:
        instance = self.instance
        zones = instance.ec2_backend.zones[instance.region_name]
        zone = instance.placement.zone
        return {
            "cloud": "aws",
            "instance": {
                "id": instance.id,
                "image": instance.image_id,
                "type": instance.instance_type,
                "ip": instance.private_ip,
                "public": instance.public_ip,
                "name": host,
                "zone": zone,
                "zone_id": next(each.zone_id for each in zones if each.name == zone),
                "region": instance.region_name,
                "role": settings.ROLE,  # moto notes an instance's profile only after RunInstances
                "market": market_of(instance),
            },
        }

    def copy_disk(self, folder: Path) -> None:
        """Copy what it has written so far, as an image of its disk; its memory is not in it."""
        folder.mkdir(parents=True)
        for layer in ("up", "home-up"):  # with overlay's marks of what was removed
            run("cp", "--archive", str(self.disk / layer), str(folder / layer))
        (folder / "up" / "etc" / "ec2lab-booted").unlink(missing_ok=True)  # a new one boots anew

    def _make_link(self) -> str:
        network, link = f"ec2-{self.short}", f"e{self.short}"
        private, public = self.instance.private_ip, self.instance.public_ip
        inside = ("ip", "-n", network)
        run("ip", "netns", "add", network)
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", network)
        run(*inside, "addr", "add", f"{private}/16", "dev", "eth0")
        if public:
            run(*inside, "addr", "add", f"{public}/32", "dev", "eth0")
        run(*inside, "addr", "add", "169.254.169.254/32", "dev", "lo")
        run(*inside, "link", "set", "lo", "up")
        run(*inside, "link", "set", "eth0", "up")
        run("ip", "link", "set", link, "master", settings.BRIDGE, "up")
        run(*inside, "route", "add", "default", "dev", "eth0", "src", private)  # leads nowhere
        return network

    def tell(self, state: dict[str, Any]) -> None:
        """Let its metadata service say this from now on."""
        fresh = self.here / "imds.new"
        fresh.write_text(json.dumps(state))
        fresh.replace(self.here / "imds.json")

    def told(self) -> dict[str, Any]:
        """Return what its metadata service says."""
        state: dict[str, Any] = json.loads((self.here / "imds.json").read_text())
        return state

    def cut(self, away: bool) -> None:
        """Let nobody reach it, or everybody again."""
        end = ("nomaster",) if away else ("master", settings.BRIDGE)
        run("ip", "link", "set", f"e{self.short}", *end)

    def stop_billing(self) -> None:
        """EC2 charges nothing once an instance shuts down, however long that takes."""
        if self.billed and self.billed[-1][1] is None:
            self.billed[-1][1] = time.time()

    def shut_down(self) -> None:
        """Press the power button: SIGTERM to all, 20 s later SIGKILL. EC2 itself waits minutes.

        A node that is just booting does not hear it yet: its power is cut, some seconds later.
        """
        if self.process is not None:
            after = threading.Timer(_POWER_OFF_S, self.process.kill)
            after.daemon = True
            after.start()
        try:
            os.kill(int((self.here / "pid").read_text()), signal.SIGTERM)
        except (OSError, ValueError):  # it has not come so far yet
            self.kill()

    def kill(self) -> None:
        """Cut its power."""
        if self.process is not None:
            self.process.kill()

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        remove_network(f"ec2-{self.short}")
        with lock:
            instance = self.instance
            state = instance.state
            self.stop_billing()
            if state in LIVE:  # it ended itself
                ends = instance.instance_initiated_shutdown_behavior == "terminate"
                self._end_instance(instance)
                instance._reason = "Client.InstanceInitiatedShutdown"
                state = "terminated" if ends or instance.lifecycle == "spot" else "stopped"
                set_state(instance, state, "Client.InstanceInitiatedShutdown")
            elif state == "shutting-down":
                set_state(instance, "terminated")
            elif state == "stopping":
                set_state(instance, "stopped")
            if instance.state == "terminated":
                shutil.rmtree(self.disk, ignore_errors=True)


def run(*command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def remove_network(name: str) -> None:
    """Remove a network namespace, and its link with it; gone already is as good."""
    subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
