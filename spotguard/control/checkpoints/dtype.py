"""Floating-point numbers in another dtype; the only part of an export that needs torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Convert: TypeAlias = Callable[[memoryview], tuple[memoryview, bool]]
"""Takes whole elements; returns them converted, and whether a finite one became infinite."""

_TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


def converter(source: str, target: str) -> Convert:
    """Return what converts from one dtype to another, both by safetensors' names of floats."""
    import torch

    from_dtype, to_dtype = (getattr(torch, _TORCH_NAMES[name]) for name in (source, target))
    largest = torch.finfo(to_dtype).max
    narrower = largest < torch.finfo(from_dtype).max

    def convert(data: memoryview) -> tuple[memoryview, bool]:
        given = torch.frombuffer(data, dtype=torch.uint8).view(from_dtype)
        made = given.to(to_dtype)
        overflowed = False
        if narrower:
            low, high = given.aminmax()
            if not (low >= -largest and high <= largest):  # rare, and NaN is unlike anything
                overflowed = bool((made.isinf() & given.isfinite()).any())
        return memoryview(made.view(torch.uint8).numpy().data), overflowed

    return convert
