"""Private random numbers for the vendors' packages, which draw jitter from Python's global ones.

A training script seeds Python's global generator and draws its augmentations from it. botocore,
google-auth and azure-core draw from the same generator whenever they renew a login or repeat a
request, and the stores are used by background threads: one 503 would change every number that the
script draws after it, and so the weights. Seen with tenacity's `wait_random_exponential`.
"""

from __future__ import annotations

import importlib
import random
import sys
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULES = {
    "boto3": (
        "botocore.retries.standard",
        "botocore.retryhandler",
        "botocore.utils",
        "urllib3.util.retry",
    ),
    "google": (
        "google.api_core.retry.retry_base",
        "google.auth._exponential_backoff",
        "google.cloud.storage._media._upload",
        "google.resumable_media._helpers",
        "google.resumable_media._upload",
        "urllib3.util.retry",
    ),
    "azure": (
        "azure.core.pipeline.policies._authentication",
        "azure.storage.blob._shared.policies",
        "urllib3.util.retry",
    ),
}
"""Each vendor's modules that name `random`; a test looks for others in what is installed."""


_GLOBAL: Any = random.seed.__self__  # type: ignore[attr-defined]  # of all functions of `random`


def _is_global(value: object) -> bool:
    return getattr(value, "__self__", None) is _GLOBAL


def _made_private() -> ModuleType:
    """Return a module like `random` whose functions draw from the system's generator."""
    private = ModuleType("random", random.__doc__)
    private.__dict__.update(vars(random))
    # The system's: it has no state, so a forked process does not repeat its parent's numbers.
    dice = random.SystemRandom()
    for name, value in vars(random).items():
        if _is_global(value):
            setattr(private, name, getattr(dice, name))
    return private


_PRIVATE = _made_private()


def draw_privately(vendor: str) -> None:
    """Give the vendor's modules random numbers of their own; called before the first request."""
    for name in MODULES[vendor]:
        try:
            module = sys.modules.get(name) or importlib.import_module(name)
        except ImportError:  # of another version of the package
            continue
        if vars(module).get("random") is random:
            vars(module)["random"] = _PRIVATE
            for function in _functions_in(module):
                _replace_defaults(function)


def _functions_in(module: ModuleType) -> Iterator[FunctionType]:
    """Yield the functions of a module, and those of its classes."""
    for value in list(vars(module).values()):
        held = vars(value).values() if isinstance(value, type) else (value,)
        for each in held:
            if isinstance(each, FunctionType) and each.__module__ == module.__name__:
                yield each


def _replace_defaults(function: FunctionType) -> None:
    """Give the function our generator where one of Python's is an argument's default.

    botocore's is: `def __init__(self, max_backoff=20, random=random.random)`.
    """
    function.__defaults__ = function.__defaults__ and tuple(
        getattr(_PRIVATE, value.__name__) if _is_global(value) else value
        for value in function.__defaults__
    )
