"""Two machines, as the kernel can play them, and the network between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PEER = Path(__file__).parents[1] / "jobs" / "peer.py"
HOST = "10.231.77.{}"


def ip(*words: str) -> bool:
    """Change the network; False if that is not allowed."""
    done = subprocess.run(["ip", *words], capture_output=True, check=False)
    return done.returncode == 0


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Give two network namespaces with a cable between them."""
    if not shutil.which("ip") or os.geteuid():
        pytest.skip("needs root, and the command `ip`")
    names = [f"spotguard-{os.getpid()}-{index}" for index in range(2)]
    cable = [f"sg{os.getpid() % 100_000}{end}" for end in "ab"]
    try:
        ready = all([ip("netns", "add", name) for name in names])
        ready = ready and ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for index, (name, end) in enumerate(zip(names, cable, strict=True)):
            inside = ("-n", name)
            ready = (
                ready
                and ip("link", "set", end, "netns", name, "name", "eth0")
                and ip(*inside, "addr", "add", f"{HOST.format(index + 1)}/24", "dev", "eth0")
                and ip(*inside, "link", "set", "eth0", "up")
                and ip(*inside, "link", "set", "lo", "up")
            )
        if not ready:
            pytest.skip("no network namespaces here")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.mark.e2e
def test_a_cut_network_is_found_by_both_sides(machines: list[str]) -> None:
    """No word, no reset, nothing: each side learns from its own kernel that the other is gone."""

    def start(rank: int, name: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, str(PEER), str(rank), HOST.format(1)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )

    ranks = [start(rank, name) for rank, name in enumerate(machines)]
    try:
        said = [rank.stdout for rank in ranks if rank.stdout is not None]
        assert [out.readline() for out in said] == ["joined\n"] * 2
        for index, name in enumerate(machines):  # to a machine that is not there
            other = HOST.format(2 - index)
            gone = ("lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
            assert ip("-n", name, "neigh", "replace", other, *gone)
        lost = [out.readline() for out in said]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [line.split(":")[0] for line in lost] == ["lost 1", "lost 0"]
    assert all("its machine does not answer" in line for line in lost)
