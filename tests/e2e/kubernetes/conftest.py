from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.kubernetes.kubernetes_lab import SCRIPT, Beside, KubernetesLab

if TYPE_CHECKING:
    from collections.abc import Iterator

_FOLDER = Path("/tmp/k8s-lab-tests")


@pytest.fixture(scope="session")
def kubernetes() -> Iterator[KubernetesLab]:
    """A cluster of two nodes, and a SkyPilot that knows it."""
    environ = {**os.environ, "K8SLAB_VENV": str(Path(sys.executable).parents[1])}
    done = subprocess.run(
        ["bash", SCRIPT, "why-not"], env=environ, capture_output=True, text=True, check=False
    )
    if done.stdout.strip():
        pytest.skip(done.stdout.strip())
    if Path("/sys/class/net/k8slab0").exists() and not _FOLDER.exists():
        pytest.skip("a Kubernetes lab is up, and there can be one: make k8s-lab-down")
    lab = KubernetesLab(_FOLDER, os.getpid())
    lab.up()
    try:
        yield lab
    finally:
        lab.down()
        shutil.rmtree(_FOLDER, ignore_errors=True)


@pytest.fixture
def beside(tmp_path: Path, kubernetes: KubernetesLab) -> Iterator[Beside]:
    """A user's machine. Nothing of its runs may be left, on it or in the cluster."""
    machine = Beside(tmp_path / "user", kubernetes)
    try:
        yield machine
        left = machine.clean_up()
        assert not left, f"processes outlived their run: {left}"
        assert not kubernetes.pods(), "pods outlived their run"
    finally:
        machine.clean_up()
