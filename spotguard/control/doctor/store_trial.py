"""What trying a store showed: rights, speed, clock, and what follows for emergency saves."""

from __future__ import annotations

from dataclasses import dataclass, field

from spotguard.shared.json_documents import HIDDEN, INLINE

NOTICES_S = {"AWS": 120.0, "GCP": 30.0, "Azure": 30.0}
"""From a cloud's word that a node will be taken to its end."""
SAVES_BYTES = (1_000_000_000, 5_000_000_000, 20_000_000_000, 80_000_000_000)
MAX_SKEW_S = 5.0
UNSAFE = "this store cannot hold runs safely; choose another"


@dataclass(frozen=True, kw_only=True)
class TrialFinding:
    """A right that is missing, or a promise that is broken."""

    right: str
    detail: str
    hint: str

    @property
    def reason(self) -> str:
        """What several findings can have in common, each told of another object."""
        return self.detail if self.hint == UNSAFE else self.hint


@dataclass(frozen=True, kw_only=True)
class SaveTime:
    """An emergency save of this size, by one node with this line to the store."""

    size_bytes: int
    seconds: float
    fits: dict[str, bool]
    """Whether each cloud's notice leaves time for it."""

    @classmethod
    def at(cls, write_bytes_per_s: float, size_bytes: int) -> SaveTime:
        """Return how long it takes at this speed, with the margin that a job keeps for itself."""
        seconds = round(1.2 * size_bytes / write_bytes_per_s + 1.0, 1)
        fits = {cloud: seconds <= notice_s for cloud, notice_s in NOTICES_S.items()}
        return cls(size_bytes=size_bytes, seconds=seconds, fits=fits)


@dataclass(kw_only=True)
class StoreTrial:
    """What a store did; None where it was not found out."""

    url: str
    rights: dict[str, bool] = field(default_factory=dict)
    """In the order of the trial."""
    findings: list[TrialFinding] = field(default_factory=list, metadata=HIDDEN)
    latency_s: float | None = None
    """Of a small durable write (median)."""
    write_bytes_per_s: float | None = None
    """Of one node with this machine's line."""
    read_bytes_per_s: float | None = None
    no_speed: str = ""
    """Why the speed could not be measured."""
    clock_skew_s: float | None = None
    """How far the store's clock is before ours, as far as that is certain."""

    @property
    def problem(self) -> str:
        """What is wrong, each reason once; empty if nothing is."""
        return "; ".join(same[0].detail for same in self.reasons())

    def reasons(self) -> list[list[TrialFinding]]:
        """Return the findings, those of one reason together: without a bucket, all are of one."""
        together: dict[str, list[TrialFinding]] = {}
        for finding in self.findings:
            together.setdefault(finding.reason, []).append(finding)
        return list(together.values())

    @property
    def saves(self) -> list[SaveTime]:
        """How long emergency saves would take from here; empty if the speed is unknown."""
        if self.write_bytes_per_s is None:
            return []
        return [SaveTime.at(self.write_bytes_per_s, size) for size in SAVES_BYTES]

    def told(self) -> TriedStore:
        """Return what `doctor --json` says of it."""
        return TriedStore(
            trial=self,
            problem=self.problem,
            notices_s=NOTICES_S,
            emergency_saves=self.saves,
        )


@dataclass(frozen=True, kw_only=True)
class TriedStore:
    """A store in `doctor --json`."""

    trial: StoreTrial = field(metadata=INLINE)
    problem: str
    """What is wrong, each reason once; empty if nothing is."""
    notices_s: dict[str, float]
    """How long before a node's end each cloud says so."""
    emergency_saves: list[SaveTime]
    """How long these would take from here; empty if the speed is unknown."""
