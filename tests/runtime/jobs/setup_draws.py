"""Prints what its set-up draws, without a seed of its own but what SEEDED sets before `init`."""

import os
import random
import sys

import torch

import spotguard.runtime as spotguard

if os.environ.get("SEEDED"):
    random.seed(11)
    torch.manual_seed(11)
    import numpy as np

    np.random.seed(11)
run = spotguard.init(
    seed=int(os.environ.get("SEED", "0")), reseed=not os.environ.get("SEEDED"), backend="gloo"
)
import numpy as np  # noqa: E402 - a script may import it as late

model = torch.nn.Linear(2, 1)
part, rest = torch.utils.data.random_split(torch.utils.data.TensorDataset(torch.zeros(9)), [5, 4])
drawn = [random.random(), np.random.rand(), model.weight.tolist(), list(part.indices)]
sys.stdout.write(f"drawn {drawn}\n")
sys.stdout.flush()
