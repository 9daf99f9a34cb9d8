"""The example that trains a GPT, telling each step; what it prints is copied to another disk.

`witnessed_gpt.py FOLDER …`: a file for each attempt and rank, in a folder that no node takes along.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import train_gpt  # type: ignore[import-not-found]  # it is copied beside this one


def main() -> None:
    """Train, with a line for each step."""
    rank = os.environ.get("RANK", "0")
    clip = torch.nn.utils.clip_grad_norm_
    name = f"{os.environ.get('SPOTGUARD_ATTEMPT', '1')}-{rank}"
    with Path(sys.argv.pop(1), name).open("a", buffering=1) as copy:

        def clip_and_tell(*args: Any, **options: Any) -> torch.Tensor:
            norm = clip(*args, **options)
            line = f"rank {rank}: gradient {norm:.6f} at {time.time()}\n"
            sys.stdout.write(line)
            copy.write(line)
            return norm

        torch.nn.utils.clip_grad_norm_ = clip_and_tell
        train_gpt.main()


if __name__ == "__main__":
    main()
