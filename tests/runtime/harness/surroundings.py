"""Prints what a script finds around it in its process, as JSON."""

import gc
import json
import os
import random
import resource
import signal
import stat
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch


def descriptors() -> dict[str, str]:
    """Return what each open file is, but for the one that lists them."""
    found = {}
    for path in sorted(Path("/proc/self/fd").iterdir()):
        try:
            mode = os.fstat(int(path.name)).st_mode
        except OSError:
            continue
        kinds = (stat.S_ISREG, stat.S_ISCHR, stat.S_ISFIFO, stat.S_ISSOCK)
        found[path.name] = next((kind.__name__ for kind in kinds if kind(mode)), "other")
    return found


def handlers() -> dict[str, str]:
    """Return the handler of each signal but SIGUSR1."""
    numbers = [n for n in signal.valid_signals() if n not in (signal.SIGUSR1,)]
    return {
        str(int(n)): str(getattr(signal.getsignal(n), "__name__", signal.getsignal(n)))
        for n in numbers
    }


def found() -> dict[str, Any]:
    """Return what a process of a script is surrounded by."""
    return {
        "environment": {k: v for k, v in os.environ.items() if k not in ("_", "SHLVL", "LC_CTYPE")},
        "folder": str(Path.cwd()),
        "arguments": sys.argv,
        "path": sys.path,
        "name": __name__,
        "file": __file__,
        "executable": sys.executable,
        "flags": str(sys.flags),
        "handlers": handlers(),
        "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),
        "descriptors": descriptors(),
        "leads its session": os.getsid(0) == os.getpid() == os.getpgrp(),
        "niceness": os.nice(0),
        "umask": os.umask(0o22) and 0,
        "limits": [resource.getrlimit(n) for n in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "threads": threading.active_count(),
        "threads of torch": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch's dice": torch.initial_seed(),
        "torch drew": torch.rand(2).tolist(),
        "random": random.random(),
        "numpy": float(np.random.rand()),
        "hash": hash("word"),
        "recursion": sys.getrecursionlimit(),
        "collects": [gc.isenabled(), gc.get_threshold()],
        "hook": sys.excepthook is sys.__excepthook__,
        "tracing": [sys.gettrace() is None, sys.getprofile() is None],
        "warnings": len(warnings.filters) > 0,
        "buffering": [sys.stdout.line_buffering, sys.stdout.encoding, sys.stderr.encoding],
        "modules of the script's folder": "tiny" in sys.modules,
    }


sys.stdout.write("found " + json.dumps(found()) + "\n")
