"""Which numbers of ranks DeepSpeed's elasticity accepts, asked of itself.

Its last version that has it is 0.19.7: from 0.19.8 on, a configuration with an `elasticity` block
is refused (deepspeed/runtime/config.py; github.com/deepspeedai/DeepSpeed/pull/8563).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Config:
    """An `elasticity` block."""

    most: int
    """`max_train_batch_size`."""
    micro_batches: tuple[int, ...]
    version: float


@dataclass(frozen=True, kw_only=True)
class Worlds:
    """What became of 1 to 64 ranks."""

    config: Config
    batches: dict[int, list[int]] = field(default_factory=dict)
    """The ranks that each global batch was set for; 0: none could be found, and nobody was told."""
    refused: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the row of the table."""
        config, sizes = self.config, sorted(self.batches)
        micro = ", ".join(map(str, config.micro_batches))
        settings = f"v{config.version}, at most {config.most}, micro-batches {micro}"
        ranks = sum(map(len, self.batches.values()))
        batches = str(sizes[0]) if len(sizes) == 1 else f"{len(sizes)} of {sizes[0]}..{sizes[-1]}"
        return f"| {settings} | {batches} | {ranks} | {len(self.refused)} |"


CONFIGS = tuple(
    Config(most=most, micro_batches=micro_batches, version=version)
    for most, micro_batches in ((512, (2, 4, 8)), (512, (8,)), (500, (8,)))
    for version in (0.1, 0.2)
)


def missing() -> str:
    """Return why DeepSpeed cannot be asked; empty if it can."""
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed: left out, because `deepspeed` is not installed"
    if importlib.util.find_spec("deepspeed.elasticity") is None:
        version = importlib.metadata.version("deepspeed")
        return f"DeepSpeed: left out, because {version} has no elasticity any more: take 0.19.7"
    return ""


def worlds(config: Config) -> Worlds:
    """Return which of 1 to 64 ranks `compute_elastic_config` accepts, and with which batch."""
    import deepspeed
    from deepspeed.elasticity import compute_elastic_config
    from deepspeed.elasticity.config import ElasticityIncompatibleWorldSize

    block = {
        "enabled": True, "max_train_batch_size": config.most, "min_gpus": 1, "max_gpus": 64,
        "micro_batch_sizes": list(config.micro_batches), "version": config.version,
    }  # fmt: skip
    found = Worlds(config=config)
    for ranks in range(1, 65):
        try:
            batch, *_ = compute_elastic_config(
                {"elasticity": block}, deepspeed.__version__, world_size=ranks
            )
        except ElasticityIncompatibleWorldSize:
            found.refused.append(ranks)
        else:
            found.batches.setdefault(batch, []).append(ranks)
    return found
