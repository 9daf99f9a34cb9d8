# /// script
# dependencies = ["torch>=2.6", "numpy", "scikit-learn", "optuna>=4.0"]
# ///
"""Search for hyperparameters with Optuna: each trial is a run, all have one budget.

python examples/recipes/hyperparameters.py
python examples/recipes/hyperparameters.py --search 6 --budget 3
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import spotguard.runtime as spotguard

AT_ONCE = 2


def train(lr: float, width: int) -> None:
    """One trial: what the script does for each run of the search."""
    run = spotguard.init(seed=5)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    data = torch.utils.data.TensorDataset(images[:1200], labels[:1200])
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    run.track(model=model, optimizer=optimizer)
    loss = torch.zeros(())
    for step in run.steps(run.loader(data, global_batch_size=64), total=60):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            loss = F.cross_entropy(model(images[1200:]), labels[1200:])
        run.log(val_loss=loss.item())
    print(f"lr {lr:g}, width {width}: loss {loss:.3f}")


def search(trials: int, budget_usd: float) -> None:
    """Ask Optuna for some points at a time, run them as a sweep, and tell it what came of them."""
    import optuna

    from spotguard import api

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1, n_startup_trials=4))
    share_usd, left_usd = budget_usd / trials, budget_usd
    while len(study.trials) < trials and left_usd >= share_usd:
        asked = [study.ask() for _ in range(min(AT_ONCE, trials - len(study.trials)))]
        points = [
            {
                "lr": f"{trial.suggest_float('lr', 1e-4, 1e-1, log=True):.3g}",
                "width": trial.suggest_categorical("width", [16, 64, 256]),
            }
            for trial in asked
        ]
        settings = {"budget": min(left_usd, share_usd * len(points)), "name": "trial"}
        sweep = api.sweep(__file__, points, settings=settings, parallel=AT_ONCE, metric="val_loss")
        told = sweep.wait()
        for trial, point in zip(asked, told.points, strict=True):
            print(point.run_id, point.arguments, point.value, point.detail)
            if point.value is None:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
            else:
                study.tell(trial, point.value)
        left_usd -= told.spent_usd or settings["budget"]
    best = study.best_trial
    print(f"best of {len(study.trials)}: {best.params}, loss {best.value:.3f}")
    print(f"{budget_usd - left_usd:.4f} of {budget_usd:g} USD spent")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--search", type=int, default=0, metavar="TRIALS")
    parser.add_argument("--budget", type=float, default=3.0, metavar="USD")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--width", type=int, default=64)
    given = parser.parse_args()
    if given.search:
        search(given.search, given.budget)
    else:
        train(given.lr, given.width)
