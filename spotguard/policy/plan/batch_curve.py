"""What sizes of micro-batches take in memory and in time, as `plan --probe` measures it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TriedSize:
    """One size of a micro-batch."""

    samples: int
    fits: bool
    peak_bytes: int | None
    """The most that the process held, Python and torch with it; None: unknown, or no room."""
    pass_s: float | None
    """One forward and backward pass on this machine's CPU; None: there was no room."""


@dataclass(frozen=True, kw_only=True)
class BatchCurve:
    """What `micro_batch_size="auto"` finds in so much memory, with what each size takes."""

    memory_bytes: int
    """What the process could have in all."""
    kept_free_bytes: int | None
    """Of that, what `auto` leaves to the copy that is saved; None: time was over first."""
    global_batch_size: int
    ranks: int
    """Over which a step's samples are shared out: those on the fewest nodes of the job."""
    most: int
    """Samples of a step that a rank has at most: no micro-batch is larger."""
    chosen: int | None
    """What `auto` takes; 0: not even one sample fits; None: time was over before it was found."""
    tried: tuple[TriedSize, ...]
    """By their samples, the fewest first."""

    @property
    def bytes_per_sample(self) -> float | None:
        """What one sample more takes, between the smallest and the largest that fit."""
        known = [(each.samples, each.peak_bytes) for each in self.tried if each.peak_bytes]
        if len(known) < 2:
            return None
        (few, low), (many, high) = known[0], known[-1]
        return (high - low) / (many - few) if high > low else None
