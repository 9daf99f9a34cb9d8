"""Scripts that do not work, each in another way, and what a smoke must say of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

HEAD = """import torch
import spotguard.runtime as spotguard
"""
SETUP = """run = spotguard.init()
x = torch.randn(64, 8)
y = x.sum(1, keepdim=True)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
"""
TRACK = "run.track(model=model, optimizer=optimizer)\n"
LOADER = """data = torch.utils.data.TensorDataset(x, y)
loader = run.loader(data, global_batch_size=16, micro_batch_size=8)
"""
LOSS = "loss = torch.nn.functional.mse_loss(model(a), b)"


def loop(body: str = LOSS, total: int = 100) -> str:
    """Return the training loop with this way to a loss."""
    return f"""for step in run.steps(loader, total={total}):
    for a, b in step:
        {body}
        step.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""


GOOD = HEAD + SETUP + TRACK + LOADER + loop()
_CURSOR = """class Cursor:
    n = 0
    def state_dict(self):
        {on_save}
        return {{"n": self.n}}
    def load_state_dict(self, state):
        self.n = state["{name}"]
cursor = Cursor()
"""


@dataclass(frozen=True)
class Broken:
    """A script, and the line and the words that its user must read."""

    source: str
    blames: str
    """The line, as it stands in the script."""
    says: str
    limit: str | None = None
    """`--smoke-limit`, for those that are stopped by the time alone."""

    def write(self, folder: Path) -> Path:
        """Write the script; return its path."""
        path = folder / "train.py"
        path.write_text(self.source)
        return path

    @property
    def line(self) -> int:
        """The number of the line to blame."""
        return self.source[: self.source.index(self.blames)].count("\n") + 1


def _broken(*parts: str, blames: str, says: str, limit: str | None = None) -> Broken:
    return Broken("".join(parts), blames, says, limit)


SCRIPTS = {
    "a missing import": _broken(
        HEAD,
        "import no_such_package\n",
        SETUP + TRACK + LOADER + loop(),
        blames="import no_such_package",
        says="No module named 'no_such_package'",
    ),
    "a wrong shape": _broken(
        HEAD + SETUP + TRACK + LOADER,
        loop("loss = model(a[:, :5]).mean()"),
        blames="loss = model(a[:, :5]).mean()",
        says="shapes cannot be multiplied",
    ),
    "a loop that is never entered": _broken(
        HEAD + SETUP + TRACK + LOADER,
        "steps = run.steps(loader, total=100)\n",
        blames="steps = run.steps(loader, total=100)",
        says="without a step of training",
    ),
    "a state that cannot be saved": _broken(
        HEAD + SETUP,
        "run.track(model=model, optimizer=optimizer, log=open(__file__))\n",
        LOADER + loop(),
        blames="run.track(model=model, optimizer=optimizer, log=open(__file__))",
        says="has no state_dict()",
    ),
    "a state that cannot be saved after two steps": _broken(
        HEAD,
        _CURSOR.format(on_save='if run.finished_steps > 1: raise KeyError("pos")', name="n"),
        SETUP,
        "run.track(model=model, optimizer=optimizer, cursor=cursor)\n",
        LOADER + loop(),
        blames='if run.finished_steps > 1: raise KeyError("pos")',
        says="KeyError: 'pos'",
    ),
    "a state that cannot be restored": _broken(
        HEAD,
        _CURSOR.format(on_save="", name="position"),
        SETUP,
        "run.track(model=model, optimizer=optimizer, cursor=cursor)\n",
        LOADER + loop(),
        blames='self.n = state["position"]',
        says="after a resume, train.py line",
    ),
    "CUDA hard-coded": _broken(
        HEAD + SETUP,
        'model = model.to("cuda")\n',
        TRACK + LOADER + loop(),
        blames='model = model.to("cuda")',
        says="model.to(run.device)",
    ),
    "a data file that is missing": _broken(
        HEAD + SETUP,
        'tokens = open("data/tokens.bin", "rb").read()\n',
        TRACK + LOADER + loop(),
        blames='tokens = open("data/tokens.bin", "rb").read()',
        says="No such file or directory: 'data/tokens.bin'",
    ),
    "an argument that is missing": _broken(
        "import argparse\n" + HEAD,
        'parser = argparse.ArgumentParser()\nparser.add_argument("--lr", required=True)\n',
        "arguments = parser.parse_args()\n",
        SETUP + TRACK + LOADER + loop(),
        blames="arguments = parser.parse_args()",
        says="the following arguments are required: --lr",
    ),
    "no finite loss": _broken(
        HEAD + SETUP + TRACK + LOADER,
        loop("loss = (model(a) - b).mean() / 0.0 * 0.0"),
        blames="step.backward(loss)",
        says="no loss of the first 2 steps is a finite number",
    ),
    "a set-up without end": _broken(
        "import time\n",
        "while True:\n    time.sleep(0.1)\n",
        HEAD + SETUP + TRACK + LOADER + loop(),
        blames="    time.sleep(0.1)",
        says="the training loop is not reached",
        limit="8s",
    ),
    "a set-up without end that ignores signals": _broken(
        "import signal\nfor number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):\n"
        "    signal.signal(number, signal.SIG_IGN)\n",
        "while True: pass\n",
        HEAD + SETUP + TRACK + LOADER + loop(),
        blames="while True: pass",
        says="the training loop is not reached",
        limit="8s",
    ),
    "a deadlock in a step": _broken(
        "import threading\n" + HEAD + SETUP + TRACK + LOADER + "lock = threading.Lock()\n",
        loop(f"lock.acquire(); lock.acquire(); {LOSS}"),
        blames="lock.acquire(); lock.acquire()",
        says="step 1 does not end",
        limit="45s",
    ),
    "an exit without an error": _broken(
        "import sys\n",
        "sys.exit(0)\n",
        HEAD + SETUP + TRACK + LOADER + loop(),
        blames="sys.exit(0)",
        says="without a step of training",
    ),
    "an exit around Python's own": _broken(
        "import os\n" + HEAD + SETUP,
        "os._exit(3)\n",
        TRACK + LOADER + loop(),
        blames="for step in run.steps",
        says="leaves with code 3",
    ),
    "a question to the user": _broken(
        HEAD + SETUP,
        'name = input("name? ")\n',
        TRACK + LOADER + loop(),
        blames='name = input("name? ")',
        says="nobody types on a node",
    ),
    "much output, then an error": _broken(
        HEAD + SETUP,
        'print("x" * 20_000_000)\nraise TypeError("after much output")\n',
        TRACK + LOADER + loop(),
        blames='raise TypeError("after much output")',
        says="TypeError: after much output",
    ),
    "a crash of Python itself": _broken(
        "import ctypes\n" + HEAD + SETUP,
        "ctypes.string_at(0)\n",
        TRACK + LOADER + loop(),
        blames="ctypes.string_at(0)",
        says="dies of SIGSEGV",
    ),
    "an error in a worker of the loader": _broken(
        HEAD,
        "class Data(torch.utils.data.Dataset):\n    def __len__(self): return 64\n"
        "    def __getitem__(self, i): raise LookupError(i)\n",
        SETUP + TRACK,
        "loader = run.loader(Data(), global_batch_size=16, micro_batch_size=8, num_workers=1)\n",
        loop(),
        blames="raise LookupError(i)",
        says="LookupError",
    ),
    "a fork that would outlive it": _broken(
        "import os, time\n" + HEAD + SETUP,
        "if os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\n    os._exit(0)\n",
        'raise RuntimeError("the parent fails")\n',
        TRACK + LOADER + loop(),
        blames='raise RuntimeError("the parent fails")',
        says="RuntimeError: the parent fails",
    ),
    "an optimizer that never steps": _broken(
        HEAD + SETUP + TRACK + LOADER,
        loop().replace("    optimizer.step()\n", ""),
        blames="step.backward(loss)",
        says="after 2 steps no weight has changed",
    ),
    "gradients that are gone before the step": _broken(
        HEAD + SETUP + TRACK + LOADER,
        loop().replace("    optimizer.step()\n", "") + "    optimizer.step()\n",
        blames="optimizer.zero_grad()",
        says="no optimizer had a gradient when it stepped",
    ),
    "an optimizer of another model": _broken(
        HEAD + SETUP,
        "other = torch.nn.Linear(8, 1)\noptimizer = torch.optim.AdamW(other.parameters())\n",
        TRACK.replace(")", ", other=dict(other.named_parameters()))") + LOADER + loop(),
        blames="run.track",
        says="none of the model's parameters",
    ),
    "a rendezvous that nobody joins": _broken(
        "import torch.distributed as dist\n" + HEAD,
        'dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=2)\n',
        SETUP + TRACK + LOADER + loop(),
        blames="dist.init_process_group",
        says="waiting, and the training loop is not reached",
        limit="30s",
    ),
    "a worker of the loader that hangs": _broken(
        "import time\n" + HEAD,
        "class Data(torch.utils.data.Dataset):\n    def __len__(self): return 64\n"
        "    def __getitem__(self, i): time.sleep(3600)\n",
        SETUP + TRACK,
        "loader = run.loader(Data(), global_batch_size=16, micro_batch_size=8, num_workers=1)\n",
        loop(),
        blames="    for a, b in step:",
        says="step 1 does not end",
        limit="45s",
    ),
    "an import that a later step needs": _broken(
        HEAD + SETUP + TRACK + LOADER,
        loop(f"exec('') if step.number < 1 else __import__('no_such_logger'); {LOSS}"),
        blames="exec('')",
        says="No module named 'no_such_logger'",
    ),
}
