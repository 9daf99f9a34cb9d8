"""The example, each of whose ranks says what it has done, and writes it where nothing is lost."""

import os
import sys
import time
from pathlib import Path

import torch
import train_gpt


def main() -> None:
    """Train."""
    folder = Path(sys.argv.pop(1))
    attempt, rank = os.environ["SPOTGUARD_ATTEMPT"], os.environ["RANK"]
    steps = 0
    with (folder / f"{attempt}-{rank}").open("a") as truth:

        def say(*_: object) -> None:
            nonlocal steps
            steps += 1
            words = f"attempt {attempt} of rank {rank}: step {steps}"
            print(words)  # noqa: T201
            print(words, time.time(), file=truth, flush=True)

        torch.optim.optimizer.register_optimizer_step_post_hook(say)
        train_gpt.main()


if __name__ == "__main__":
    main()
