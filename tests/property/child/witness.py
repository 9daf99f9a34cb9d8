"""What a rank's training came to: every number of all that it tracked, and where its dice lie.

It reads the objects themselves, not what a checkpoint has of them: what that forgets would be
forgotten here, too.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from pathlib import Path


class Witness:
    """Remembers what the script tracked; writes what became of it."""

    def __init__(self) -> None:
        self._seen: dict[str, Any] = {}

    def saw(self, arguments: tuple[Any, ...]) -> None:
        """Remember one tracked object: the arguments are those of `Run._track`."""
        _, _, name, item = arguments
        self._seen[name] = item

    def write(self, path: Path) -> None:
        """Write all of it, by name."""
        found: dict[str, Any] = {}
        for name, item in self._seen.items():
            _take(name, getattr(item, "value", None), item, found)
        np.savez(path.with_suffix(".part.npz"), **found)
        path.with_suffix(".part.npz").rename(path)


def _take(name: str, value: Any, item: Any, into: dict[str, Any]) -> None:
    if isinstance(value, torch.nn.Module):
        named = [*value.named_parameters(), *value.named_buffers()]
        for key, tensor in named:
            into[f"{name}.{_plain_name(key)}"] = _bytes_of(tensor)
    elif isinstance(value, torch.optim.Optimizer):
        _take_optimizer(name, value, into)
    elif isinstance(value, torch.Generator):
        into[name] = value.get_state().numpy()
    elif isinstance(value, random.Random):
        _walk(name, value.getstate(), into)
    elif isinstance(value, dict):
        _walk(name, value, into)
    elif hasattr(value, "state_dict"):
        _walk(name, value.state_dict(), into)
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            _walk(f"{name}*", _plain(vars(value)), into)
    elif hasattr(item, "read"):
        _walk(name, item.read(), into)


def _plain_name(key: str) -> str:
    """Return a tensor's name without what wraps its module: on one rank nothing may."""
    return ".".join(part for part in key.split(".") if part not in ("module", "_orig_mod"))


def _take_optimizer(name: str, optimizer: torch.optim.Optimizer, into: dict[str, Any]) -> None:
    numbers: dict[Any, int] = {}
    for group_number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            numbers[parameter] = len(numbers)
        options = {key: value for key, value in group.items() if key != "params"}
        _walk(f"{name}.group{group_number}", options, into)
    for parameter, state in optimizer.state.items():
        if isinstance(state, dict) and parameter in numbers:
            _walk(f"{name}.{numbers[parameter]}", state, into)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return what a scheduler keeps beside its state dict, if it is plain."""
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, (bool, int, float, torch.Tensor)) and not key.startswith("__")
    }


def _walk(name: str, value: Any, into: dict[str, Any]) -> None:
    if isinstance(value, torch.Tensor):
        into[name] = _bytes_of(value)
    elif isinstance(value, dict):
        for key, part in value.items():
            _walk(f"{name}.{key}", part, into)
    elif isinstance(value, (list, tuple)) and len(value) < 1000:
        for number, part in enumerate(value):
            _walk(f"{name}.{number}", part, into)
    elif isinstance(value, (bool, int, float, np.ndarray, np.generic)):
        found = np.array(value)
        into[name] = found if found.dtype != object else _of_text(repr(value))
    elif value is None or isinstance(value, str):
        into[name] = _of_text(repr(value))


def _of_text(text: str) -> Any:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _bytes_of(tensor: torch.Tensor) -> Any:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    whole = whole.detach().to("cpu").contiguous()
    if whole.dtype in (torch.bfloat16, torch.float16):
        return whole.float().numpy()
    try:
        return whole.clone().numpy()
    except TypeError:
        return whole.reshape(-1).view(torch.uint8).clone().numpy()
