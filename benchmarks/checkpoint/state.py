"""The training state that every method saves: a model and its Adam moments, overwritten at will."""

from __future__ import annotations

import math

import torch
from torch import nn

_BYTES_PER_PARAMETER = 12  # fp32: the weight and two moments
_TENSORS_PER_PARAMETER = 4  # those three, and Adam's step
_WIDTHS = (1024, 512, 256, 128, 64, 32)

Tree = dict[str, dict[str, torch.Tensor]]


class TrainingState:
    """A model and an Adam optimizer of about `size_mb` megabytes together.

    The parameters have the shapes of a GPT; with `tensors` they are that many equal vectors.
    """

    def __init__(
        self, *, size_mb: float, tensors: int | None = None, device: str = "cpu", seed: int = 0
    ) -> None:
        target = int(size_mb * 1e6 / _BYTES_PER_PARAMETER)
        shapes = _equal_shapes(target, tensors) if tensors else _gpt_shapes(target)
        generator = torch.Generator(device).manual_seed(seed)
        self.device = torch.device(device)
        self.model = nn.ParameterDict(
            {
                name: nn.Parameter(torch.empty(shape, device=device).normal_(generator=generator))
                for name, shape in shapes.items()
            }
        )
        self.optimizer = torch.optim.Adam(self.model.parameters())
        for parameter in self.model.parameters():
            self.optimizer.state[parameter] = {
                "step": torch.tensor(7.0),
                "exp_avg": torch.empty_like(parameter.data).normal_(generator=generator),
                "exp_avg_sq": torch.empty_like(parameter.data).uniform_(generator=generator),
            }

    def tree(self) -> Tree:
        """Return all live tensors by name, two levels deep: what the rivals are given."""
        named = dict(self.model.named_parameters())
        return {
            "model": {name: parameter.detach() for name, parameter in named.items()},
            "optimizer": {
                f"{name}.{key}": tensor
                for name, parameter in named.items()
                for key, tensor in self.optimizer.state[parameter].items()
            },
        }

    def flat(self) -> dict[str, torch.Tensor]:
        """Return all live tensors by their full name."""
        return {
            f"{part}.{name}": tensor
            for part, group in self.tree().items()
            for name, tensor in group.items()
        }

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.flat().values())

    def overwrite(self) -> None:
        """Change every value of every tensor, as an optimizer step does."""
        with torch.no_grad():
            for tensor in self.flat().values():
                tensor.add_(1.0)

    def fingerprint(self) -> list[int]:
        """Return a sum over the bits of each tensor: equal states have equal ones."""
        words = (tensor.reshape(-1).view(torch.int32) for tensor in self.flat().values())
        return [int(word.sum(dtype=torch.int64)) for word in words]


def _equal_shapes(target: int, tensors: int) -> dict[str, tuple[int, ...]]:
    count = max(tensors // _TENSORS_PER_PARAMETER, 1)
    return {f"vector_{i}": (max(target // count, 1),) for i in range(count)}


def _gpt_shapes(target: int) -> dict[str, tuple[int, ...]]:
    """Return embeddings of at most a third of `target` parameters, then blocks."""
    width = next((w for w in _WIDTHS if 33 * w * w <= target // 3), _WIDTHS[-1])
    shapes: dict[str, tuple[int, ...]] = {
        "tokens": (32 * width, width),
        "positions": (width, width),
    }
    block: dict[str, tuple[int, ...]] = {
        "qkv": (3 * width, width),
        "qkv_bias": (3 * width,),
        "out": (width, width),
        "out_bias": (width,),
        "up": (4 * width, width),
        "up_bias": (4 * width,),
        "down": (width, 4 * width),
        "down_bias": (width,),
        "norm_1": (width,),
        "norm_1_bias": (width,),
        "norm_2": (width,),
        "norm_2_bias": (width,),
    }
    per_block = sum(math.prod(shape) for shape in block.values())
    blocks = max(round((target - 33 * width * width) / per_block), 1)
    for i in range(blocks):
        shapes |= {f"block_{i}_{name}": shape for name, shape in block.items()}
    return shapes
