"""What starts a job's ranks on a node.

    python -m spotguard.launch.ranks --nnodes=2 --node-rank=0 ... job.py ...

The flags are torchrun's, and so is what the ranks are told and how they are ended. torchrun itself
imports torch before it starts anything, which takes seconds of each start and 200 MB of the node,
and it prints a table that says FAILED after a clean save.
"""

from __future__ import annotations

import os
import sys

from spotguard.launch.ranks.node_ranks import NodeRanks
from spotguard.launch.ranks.plan import RankPlan
from spotguard.launch.ranks.worker_environment import look_after_workers


def main() -> None:
    """Run this node's ranks to their end; exits with 0, or as the first of them that failed."""
    look_after_workers(os.environ)
    sys.exit(NodeRanks(RankPlan.of(sys.argv[1:])).run())


if __name__ == "__main__":
    main()
