# /// script
# dependencies = ["torch>=2.6", "numpy", "torchao"]
# ///
"""AdamW with moments of eight bits, by torchao: a quarter of their memory, saved as they are.

python examples/recipes/adamw_8bit.py
spotguard up examples/recipes/adamw_8bit.py --yes
"""

import torch
from torch import nn
from torchao.optim import AdamW8bit

import spotguard.runtime as spotguard


def main() -> None:
    run = spotguard.init(seed=8)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
    optimizer = AdamW8bit(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    data = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    for step in run.steps(run.loader(list(data), global_batch_size=64), total=30):
        for x in step:
            step.backward((model(x) - x.roll(1, 1)).square().mean())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    moments = 0
    for state in optimizer.state.values():
        for moment in (state["exp_avg"], state["exp_avg_sq"]):
            parts = getattr(moment, "tensor_attrs", None)
            kept = [getattr(moment, name) for name in parts] if parts else [moment]
            moments += sum(part.nbytes for part in kept)
    plain = 8 * sum(parameter.numel() for parameter in model.parameters())
    print(f"moments of {moments / 1e3:.0f} kB instead of {plain / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
