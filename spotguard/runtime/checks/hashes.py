"""Hashes of plain values, tensors and containers of them: the same in every process."""

from __future__ import annotations

from typing import Any

import torch
import xxhash

from spotguard.runtime.state.sharding import local_of

PLAIN = (bool, int, float, str, bytes, complex, type(None))
"""The types of values that cannot change in place."""
SAMPLED = 64
"""Elements of a tensor, or items of a long list, that are looked at unless all are."""
_DEEPEST = 12


class Hasher:
    """Hashes plain values, tensors and containers of them."""

    def __init__(self, *, whole: bool) -> None:
        self._hash = xxhash.xxh3_64()
        self._whole = whole

    def add(self, value: Any, depth: int = 0) -> Hasher:
        """Take in a value; what is neither plain nor a container of such counts for nothing."""
        if isinstance(value, torch.Tensor):
            self._text(str(hash_tensor(value, whole=self._whole)))
        elif isinstance(value, dict):
            for key, item in sorted(dict.items(value), key=by_key):
                self._text(f"{key!r}=" if type(key) in PLAIN else "=")
                self.add(item, depth + 1)
        elif isinstance(value, (list, tuple)) and depth < _DEEPEST:
            self._text(f"{len(value)}[")
            if len(value) > SAMPLED and all(type(item) in (int, float) for item in value):
                self._text(repr(value))
            else:
                for item in value:
                    self.add(item, depth + 1)
        elif type(value) in PLAIN:
            self._text(f"{type(value).__name__}:{value!r};")
        elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
            self._hash.update(value.tobytes())
        return self

    def _text(self, text: str) -> None:
        self._hash.update(text.encode(errors="surrogatepass"))

    def digest(self) -> int:
        """Return the hash of all that was taken in."""
        return self._hash.intdigest()


def by_key(pair: tuple[Any, Any]) -> str:
    """Return what sorts the items of a dict; keys that may have a `__repr__` of their own stay."""
    return repr(pair[0]) if type(pair[0]) in PLAIN else ""


def hash_of(value: Any) -> int:
    """Return a hash of a plain value, the same in every process."""
    return Hasher(whole=True).add(value).digest()


def hash_tensor(value: torch.Tensor, *, whole: bool) -> int:
    """Return a hash of a tensor's values, or of some of them; waits for its device."""
    local = local_of(value).detach()
    head = f"{local.dtype}{tuple(local.shape)}"
    if local.device.type == "meta" or local.is_sparse or local.layout is not torch.strided:
        return xxhash.xxh3_64_intdigest(head.encode())
    if local.is_quantized:
        local = local.int_repr()
    if not whole and local.numel() > SAMPLED:
        local = _sampled(local)
    flat = local.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    hasher = xxhash.xxh3_64(head.encode())
    if flat.numel():
        hasher.update(flat.view(torch.uint8).numpy().data)
    return hasher.intdigest()


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Return some elements, evenly spread, of which those at the beginning and the end are two."""
    numel = tensor.numel()
    places = torch.linspace(0, numel - 1, SAMPLED, dtype=torch.float64).long()
    index = torch.unravel_index(places.to(tensor.device), tensor.shape)
    return tensor[index]
