"""How busy a node is: its processor and memory by psutil, its GPUs by NVIDIA's own library.

Both are looked at by the thread that reports, never by the training loop.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from spotguard.events.metric import node_metric

if TYPE_CHECKING:
    from types import ModuleType


class MachineUse:
    """One node's use of its parts. Used by one thread."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._psutil: ModuleType | None = None
        self._gpus: list[Any] = []
        self._nvml: ModuleType | None = None
        self._looked = False

    def look(self) -> dict[str, float]:
        """Return what is used now, by metric; the first time less: some are measured in between."""
        if not self._looked:
            self._looked = True
            self._prepare()
        found = self._of_processor()
        for index, gpu in enumerate(self._gpus):
            found |= self._of_gpu(index, gpu)
        return found

    def _prepare(self) -> None:
        with contextlib.suppress(ImportError):
            import psutil

            self._psutil = psutil
            psutil.cpu_percent(None)
        try:
            import pynvml
        except ImportError:  # the extra `gpu` is not installed
            return
        with contextlib.suppress(pynvml.NVMLError):  # no driver, no GPU
            pynvml.nvmlInit()
            self._nvml = pynvml
            self._gpus = [
                pynvml.nvmlDeviceGetHandleByIndex(index)
                for index in range(pynvml.nvmlDeviceGetCount())
            ]

    def _of_processor(self) -> dict[str, float]:
        psutil = self._psutil
        if psutil is None:
            return {}
        found = {node_metric(self._node, "cpu_pct"): psutil.cpu_percent(None)}
        with contextlib.suppress(psutil.Error, OSError):
            mine = psutil.Process(os.getpid())
            siblings = [mine, *mine.children(recursive=True)]
            rss = 0
            for process in siblings:
                with contextlib.suppress(psutil.Error):
                    rss += process.memory_info().rss
            found[node_metric(self._node, "rss_bytes")] = float(rss)
        return found

    def _of_gpu(self, index: int, gpu: Any) -> dict[str, float]:
        nvml, found = self._nvml, {}
        assert nvml is not None

        def note(what: str, value: float) -> None:
            found[node_metric(self._node, what, gpu=index)] = float(value)

        with contextlib.suppress(nvml.NVMLError):
            note("utilization_pct", nvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
        with contextlib.suppress(nvml.NVMLError):
            memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
            note("memory_bytes", memory.used)
            note("memory_total_bytes", memory.total)
        with contextlib.suppress(nvml.NVMLError):
            note("power_w", nvml.nvmlDeviceGetPowerUsage(gpu) / 1000)
        with contextlib.suppress(nvml.NVMLError):
            note("energy_j", nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000)
        return found
