# /// script
# dependencies = ["torch>=2.6", "numpy", "scikit-learn", "torchao"]
# ///
"""Pruned while it trains, and in eight bits after that, by torchao: smaller to keep and to serve.

python examples/recipes/pruning_int8.py
spotguard up examples/recipes/pruning_int8.py --yes
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import spotguard.runtime as spotguard

STEPS, SPARSITY = 150, 0.8


def prune(model: nn.Module, done: int) -> None:
    """Zero the smallest weights of each layer: none at first, 80 % from two thirds on.

    It follows from the step and the weights alone, so a resume has nothing more to restore.
    """
    sparsity = SPARSITY * min(1.0, done / (STEPS * 2 / 3))
    for layer in model:
        if isinstance(layer, nn.Linear):
            flat = layer.weight.detach().abs().flatten()
            smallest = flat.argsort()[: int(sparsity * len(flat))]
            layer.weight.detach().view(-1)[smallest] = 0


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    run = spotguard.init(seed=13, save_every="100 steps")
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run.track(model=model, optimizer=optimizer)
    train = torch.utils.data.TensorDataset(images[:1500], labels[:1500])
    for step in run.steps(run.loader(train, global_batch_size=128), total=STEPS):
        for x, y in step:
            step.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        prune(model, step.number)
        optimizer.zero_grad(set_to_none=True)
    held = images[1500:], labels[1500:]
    before = accuracy(model, *held)
    weights = sum(layer.weight.numel() for layer in model if isinstance(layer, nn.Linear))
    kept = sum(int(layer.weight.count_nonzero()) for layer in model if isinstance(layer, nn.Linear))
    # After the run: its checkpoints keep the weights from which another form can be made.
    quantize_(model, Int8WeightOnlyConfig())
    print(f"{kept} of {weights} weights are not zero: accuracy {before:.3f}")
    after = accuracy(model, *held)
    print(f"{weights / 1e3:.0f} kB in int8 instead of {weights / 250:.0f} kB: accuracy {after:.3f}")


if __name__ == "__main__":
    main()
