"""What the numbers of a benchmark depend on: the machine, its software, its load."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def describe_machine(device: str) -> dict[str, str]:
    """Return what the numbers depend on."""
    facts = {
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()} "
        f"{platform.release()}",
        "software": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads",
        "load average before": " ".join(f"{load:.2f}" for load in os.getloadavg()),
    }
    if device == "cuda":
        facts["GPU"] = torch.cuda.get_device_name()
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
