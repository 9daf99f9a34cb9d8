"""Virtual environments of other Pythons, without the gigabytes that a job on CPUs never loads."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.programs.pythons import stand_in_cuda

ROOT = Path(__file__).parents[3]
_DEAD_WEIGHT = re.compile(r"(nvidia-|cuda-|triton\b)")


class NotToBeHadError(Exception):
    """What an environment needs is not on this machine, nor in its registries."""


@dataclass(frozen=True)
class Environment:
    """One Python with all that the quick tests and the demo need, or with a wheel for users."""

    version: str
    lowest: bool = False
    """True: with the lowest versions that `pyproject.toml` promises, not the newest."""
    wheel: Path | None = None
    """What is installed, with what it needs and nothing else; None is this checkout, for tests."""

    @property
    def name(self) -> str:
        """What it is called in the report."""
        if self.wheel is not None:
            return f"{self.version}-wheel"
        return f"{self.version}-lowest" if self.lowest else self.version

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return ROOT / ".pythons" / self.name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def make(self, interpreter: Path) -> None:
        """Install it, unless it is there and younger than what says what belongs in it.

        One with a wheel is made anew each time.

        Raises:
            NotToBeHadError: a package, the network or a compiler is missing.
        """
        done = self.folder / ".installed"  # also what `make demo` looks at
        asked = (ROOT / "pyproject.toml", ROOT / "constraints.txt")
        newest = max(path.stat().st_mtime for path in asked)
        if self.wheel is None and done.exists() and done.stat().st_mtime > newest:
            return
        _uv("venv", "--quiet", "--clear", "--python", str(interpreter), str(self.folder))
        wanted = self.folder / "wanted.txt"
        wanted.write_text("".join(f"{line}\n" for line in self._resolved()))
        into = ("pip", "install", "--quiet", "--no-deps", "--python", str(self.python))
        _uv(*into, "--requirements", str(wanted))
        _uv(*into, *([str(self.wheel)] if self.wheel else ["--editable", str(ROOT)]))
        self._name_dead_weight()
        self._mend_torch()
        done.touch()

    def _name_dead_weight(self) -> None:
        """Say that what is left out is there, to whoever asks if torch has all it needs."""
        [packages] = self.folder.glob("lib/python*/site-packages")
        for line in (self.folder / "left-out.txt").read_text().splitlines():
            name, version = line.split("==")
            described = packages / f"{name.replace('-', '_')}-{version}.dist-info"
            described.mkdir(exist_ok=True)
            (described / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
            (described / "WHEEL").write_text("Wheel-Version: 1.0\nTag: py3-none-any\n")

    def _resolved(self) -> list[str]:
        """Return what to install, each package at its version; write down what is left out."""
        limits = self._lowest() if self.lowest else ROOT / "constraints.txt"
        extras = () if self.wheel else _extras("dev")
        lines = self._compile("--constraint", str(limits), *extras).splitlines()
        dead = [line for line in lines if _DEAD_WEIGHT.match(line)]
        (self.folder / "left-out.txt").write_text("".join(f"{line}\n" for line in dead))
        return [line for line in lines if line not in dead]

    def _lowest(self) -> Path:
        """Write down the lowest versions that `pyproject.toml` promises; the rest is free."""
        how = ("--resolution=lowest-direct", *_extras("aws", "gcp", "azure", "sky"))
        ours = set(map(_name, self._compile("--no-deps", *how).splitlines()))
        lines = [line for line in self._compile(*how).splitlines() if _name(line) in ours]
        lowest = self.folder / "lowest.txt"
        lowest.write_text("".join(f"{line}\n" for line in lines))
        return lowest

    def _compile(self, *options: str) -> str:
        how = ("--quiet", "--no-header", "--no-annotate", "--python", str(self.python))
        return _uv("pip", "compile", *how, *options, str(ROOT / "pyproject.toml"))

    def _mend_torch(self) -> None:
        if self._imports_torch():
            return
        try:
            [lib] = self.folder.glob("lib/python*/site-packages/torch/lib")
            stand_in_cuda.put_beside(lib)
        except (OSError, subprocess.CalledProcessError) as problem:
            raise NotToBeHadError(f"its torch wants CUDA's libraries, and {problem}") from problem
        if not self._imports_torch():
            raise NotToBeHadError("its torch cannot be imported")

    def _imports_torch(self) -> bool:
        done = subprocess.run([self.python, "-c", "import torch"], capture_output=True, check=False)
        return not done.returncode


def _name(line: str) -> str:
    return line.partition("==")[0]


def _extras(*names: str) -> list[str]:
    return [f"--extra={name}" for name in names]


def _uv(*words: str) -> str:
    """Return what uv printed."""
    done = subprocess.run(
        [sys.executable, "-m", "uv", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NotToBeHadError(" ".join(done.stderr.split())[-600:])
    return done.stdout
