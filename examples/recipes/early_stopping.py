# /// script
# dependencies = ["torch>=2.6", "numpy", "scikit-learn"]
# ///
"""Stop when the validation loss has not improved for a while, and take the best weights.

python examples/recipes/early_stopping.py
spotguard up examples/recipes/early_stopping.py --yes
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import spotguard.runtime as spotguard

TOTAL = 2000


def main() -> None:
    run = spotguard.init(seed=3, save_every="100 steps")
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train = torch.utils.data.TensorDataset(images[:300], labels[:300])
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)

    def validate() -> float:
        with torch.no_grad():
            return F.cross_entropy(model(images[300:]), labels[300:]).item()

    for step in run.steps(run.loader(train, global_batch_size=64), total=TOTAL):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step.number % 10 == 9:
            run.best(validate(), patience=5, min_delta=1e-3)
    done = run.finished_steps
    best = run.restore_best()
    print(f"{done} of {TOTAL} steps; best after {best}, loss {validate():.3f}")


if __name__ == "__main__":
    main()
