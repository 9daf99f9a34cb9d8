"""Lets a CUDA build of torch run on CPUs without the gigabytes of CUDA.

PyPI's torch for Linux is linked against some fifteen of NVIDIA's libraries. To a job on CPUs they
are dead weight of 3 GB, but without them `import torch` fails. So each gets a stand-in beside
torch's own: empty, and linked to one library in which every function that torch asks of CUDA
answers "no device". torch then finds no GPU, as it does on a machine without one.
"""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

NO_DEVICE = 100
"""cudaErrorNoDevice."""
_LIBRARY = re.compile(r"\(NEEDED\).*\[(lib(?:cu|nccl|nv)[^\]]*)\]")
_FUNCTION = re.compile(r" [Uw] (_*(?:cu|nccl|nv)[A-Za-z]\w*)")


def put_beside(torch_lib: Path) -> None:
    """Make the stand-ins in torch's folder of libraries.

    Raises:
        OSError: there is no compiler or no binutils.
        subprocess.CalledProcessError: one of them failed.
    """
    libraries = sorted(map(str, torch_lib.glob("*.so")))
    functions = set(_FUNCTION.findall(_said("nm", "-D", "--undefined-only", *libraries)))
    answers = torch_lib / "libno_device.so"
    source = f"int no_device(void) {{ return {NO_DEVICE}; }}\n" + "".join(
        f'int {name}(void) __attribute__((alias("no_device")));\n' for name in sorted(functions)
    )
    # In one library: the dynamic linker wants no symbols in one that it wants versions of.
    _link(answers, "-fPIC", "-fno-builtin", "-w", "-x", "c", "-", source=source)
    for name in set(_LIBRARY.findall(_said("readelf", "-d", *libraries))):
        _link(torch_lib / name, "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", str(answers))


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _link(made: Path, *options: str, source: str = "") -> None:
    command = ["cc", "-shared", "-nostdlib", f"-Wl,-soname,{made.name}", *options, "-o", str(made)]
    subprocess.run(command, input=source, text=True, capture_output=True, check=True)
