"""What a manifest's state tree says of tracked modules, read without torch and without trust.

The runtime writes a module's state dict as a list of [key, value] pairs, a tensor value being
`{"$": "tensor", "name": ...}`. Tied weights are several keys that name one tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spotguard.checkpoint.strict_json import Json


def is_module(tree: Json) -> bool:
    """Return whether a tracked object's tree is that of a module."""
    return (
        isinstance(tree, list)
        and bool(tree)
        and all(
            isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in tree
        )
    )


def module_tensors(tree: Json) -> dict[str, str]:
    """Return the module's own key of each tensor, with the name under which it is stored."""
    return {key: name for key, value in tree if (name := _tensor_name(value)) is not None}


def other_values(tree: Json) -> list[str]:
    """Return the module's keys that are no tensors: extra state."""
    return [key for key, value in tree if _tensor_name(value) is None]


def tensor_names(tree: Json) -> list[str]:
    """Return the stored names of all tensors and arrays of any object, in order."""
    if isinstance(tree, list):
        return [name for item in tree for name in tensor_names(item)]
    if not isinstance(tree, dict):
        return []
    if tree.get("$") in ("tensor", "ndarray"):
        return [tree["name"]] if isinstance(tree.get("name"), str) else []
    return [name for item in tree.values() for name in tensor_names(item)]


def _tensor_name(value: Json) -> str | None:
    if isinstance(value, dict) and value.get("$") == "tensor":
        name = value.get("name")
        return name if isinstance(name, str) else None
    return None
