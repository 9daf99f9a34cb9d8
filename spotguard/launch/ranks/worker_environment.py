"""What a rank finds in its environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from spotguard.events import env
from spotguard.launch.ranks.plan import RankPlan

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

_SITE: Final = Path(__file__).with_name("worker_site")
_CODE_SITE: Final = Path(__file__).with_name("code_site")
_FIXED_SCRIPT: Final = Path(__file__).with_name("fixed_script.py")


def of_rank(plan: RankPlan, local_rank: int, meeting_port: int) -> dict[str, str]:
    """Return what torchrun tells a rank; all meet at this port of the first node.

    One that is alone is told that it may keep a store there itself, if its script wants any.
    """
    rank = plan.node * plan.ranks + local_rank
    threads = {} if plan.ranks == 1 or "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    return {
        **threads,
        **{"RANK": str(rank), "LOCAL_RANK": str(local_rank), "ROLE_RANK": str(rank)},
        **{"WORLD_SIZE": str(plan.world), "ROLE_WORLD_SIZE": str(plan.world)},
        **{"LOCAL_WORLD_SIZE": str(plan.ranks), "GROUP_WORLD_SIZE": str(plan.nodes)},
        **{"GROUP_RANK": str(plan.node), "ROLE_NAME": "default"},
        **{"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"},
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": str(plan.world > 1),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "MASTER_ADDR": plan.host,
        "MASTER_PORT": str(meeting_port),
    }


def of_only_rank(port: int) -> dict[str, str]:
    """Return what the rank of a job of one process is told, on this machine alone."""
    plan = RankPlan(nodes=1, node=0, ranks=1, host="127.0.0.1", port=port, script=())
    return of_rank(plan, 0, port)


def look_after_workers(given: MutableMapping[str, str]) -> None:
    """Have each worker's Python look whether its script trains in a loop of spotguard."""
    import_from_copy(given)
    _put_first(_SITE, given)


def import_from_copy(given: MutableMapping[str, str]) -> None:
    """Have all Pythons below import the run's own copy of the code, if there is one."""
    if given.get(env.CODE):
        _put_first(_CODE_SITE, given)


def _put_first(folder: Path, given: MutableMapping[str, str]) -> None:
    before = given.get("PYTHONPATH")
    given["PYTHONPATH"] = os.pathsep.join([str(folder), *([before] if before else [])])


def script_command(script: Sequence[str], given: Mapping[str, str]) -> list[str]:
    """Return what of a command line runs a script, as the run's copy of it has it if there is one.

    `script` is its path and its arguments, `given` the environment that it gets.
    """
    copies = given.get(env.CODE, "").split(os.pathsep)
    folders = given.get(env.CODE_OF, "").split(os.pathsep)
    for copy, folder in zip(copies, folders, strict=False):
        whole, top = Path(script[0]).resolve(), Path(folder).resolve()
        if copy and folder and whole.is_relative_to(top):
            there = Path(copy) / whole.relative_to(top)
            if there.is_file():
                return [str(_FIXED_SCRIPT), str(there), *script]
    return list(script)
