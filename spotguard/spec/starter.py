"""What `spotguard init` writes: a commented configuration and a small script that works."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from spotguard.spec.setting_catalogue import catalogue
from spotguard.spec.templates import load_template

if TYPE_CHECKING:
    from spotguard.spec.setting_catalogue import ConfigField

_HEAD = """\
# Settings for `spotguard up train.py`. Everything here is optional; remove a '#' to set a value.
# `spotguard config show train.py` tells what is in effect and where it comes from.
"""

_TRAIN = '''\
"""Fit a line to noisy points. Survives interruptions: spotguard up train.py --yes"""

import spotguard.runtime as spotguard
import torch
from torch import nn

STEPS = 200


def points(count: int) -> torch.utils.data.TensorDataset:
    """Return the points; the same on every node and in every attempt."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(count, 1, generator=generator)
    noise = 0.05 * torch.randn(count, 1, generator=generator)
    return torch.utils.data.TensorDataset(x, 3 * x - 1 + noise)


def main() -> None:
    """Train, from the last save if there is one."""
    run = spotguard.init()
    torch.manual_seed(0)
    model = nn.Linear(1, 1).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    # The global batch stays 64 on any number of nodes; each gets its share of micro-batches.
    loader = run.loader(points(1024), global_batch_size=64, micro_batch_size=8)
    # Name all that changes while training. What is not tracked is not restored.
    run.track(model=model, optimizer=optimizer, scheduler=scheduler)

    for step in run.steps(loader, total=STEPS):
        for x, y in step:
            loss = nn.functional.mse_loss(model(x.to(run.device)), y.to(run.device))
            step.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)

    print(f"y = {model.weight.item():.2f} x + {model.bias.item():.2f}")  # about 3 x - 1


if __name__ == "__main__":
    main()
'''


def starter_files(template: str = "base") -> dict[str, str]:
    """Return the starter's files, name to content.

    Raises:
        SpecError: there is no such template.
    """
    load_template(template)
    return {"spotguard.toml": _configuration(template), "train.py": _TRAIN}


def _configuration(template: str) -> str:
    parts = [_HEAD]
    table = ""
    for field in catalogue().values():
        above, _, key = field.key.rpartition(".")
        if above != table:
            table = above
            parts.append(f"\n[{above}]\n")
        if field.key == "template" and template != field.default:
            parts.append(f'\n{_comment(field)}{key} = "{template}"\n')
        else:
            parts.append(f"\n{_comment(field)}# {key} = {field.setting.example}\n")
    return "".join(parts)


def _comment(field: ConfigField) -> str:
    lines = textwrap.wrap(
        f"{field.doc} Allowed: {field.setting.allowed}.".replace("`", ""),
        width=98,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "".join(f"# {line}\n" for line in lines)
