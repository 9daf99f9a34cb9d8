"""All that a user asked for, checked and frozen: `JobSpec`, and the tables that it is made of."""

from spotguard.spec.model.job import (
    LOCAL_ON_DEMAND_USD_PER_H,
    LOCAL_SPOT_USD_PER_H,
    SCHEMA,
    JobSpec,
    build_spec,
)
from spotguard.spec.model.phases import PLACE_FIELDS, PhaseSpec
from spotguard.spec.model.tables import LocalSpec, NodeSpec, SmokeSpec
from spotguard.spec.model.team import TeamCap, TeamSpec

__all__ = [
    "build_spec",
    "JobSpec",
    "LOCAL_ON_DEMAND_USD_PER_H",
    "LOCAL_SPOT_USD_PER_H",
    "LocalSpec",
    "NodeSpec",
    "PhaseSpec",
    "PLACE_FIELDS",
    "SCHEMA",
    "SmokeSpec",
    "TeamCap",
    "TeamSpec",
]
