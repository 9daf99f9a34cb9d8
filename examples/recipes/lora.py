# /// script
# dependencies = ["torch>=2.6", "numpy", "peft"]
# ///
"""LoRA by peft on a frozen base, which is stored once: saves hold the adapters alone.

python examples/recipes/lora.py
spotguard up examples/recipes/lora.py --yes
"""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import spotguard.runtime as spotguard


class Base(nn.Module):
    """Stands for a pretrained model, which a script loads from its files."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def main() -> None:
    run = spotguard.init(seed=6, save_every="20 steps")
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["first", "second"])
    model = get_peft_model(Base(), config)
    learns = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learns, lr=1e-2)
    run.track(model=model, optimizer=optimizer, frozen="skip")
    data = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    for step in run.steps(run.loader(list(data), global_batch_size=32), total=60):
        for x in step:
            step.backward((model(x) - x.roll(1, 1)).square().mean())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    trained = sum(parameter.numel() for parameter in learns)
    print(f"{trained} of {sum(p.numel() for p in model.parameters())} parameters are trained")


if __name__ == "__main__":
    main()
