"""What this run sees of spot markets, noted for all later runs of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.control.journal.market_log import note_market, read_market
from spotguard.control.supervisor.placement.seen_places import accelerator_of, place_name, was_taken
from spotguard.events.states import EndReason
from spotguard.policy.market.sightings import ASKED, GRANTED, LEFT, LOST, REFUSED, Sighting

if TYPE_CHECKING:
    from pathlib import Path

    from spotguard.control.journal.record import AttemptRecord, RunRecord

_NEVER_CAME = frozenset({EndReason.LAUNCH_FAILED})


class MarketNotes:
    """Notes each thing once, also over a new controller; nothing at all without a path."""

    def __init__(self, path: Path | None, record: RunRecord) -> None:
        self._path = path
        self._run = record.run_id
        self._record = record
        self._stamp: tuple[int, int] | None = None
        self._read: tuple[Sighting, ...] = ()
        self._known = {each.key for each in self.sightings() if each.run == self._run}

    def sightings(self) -> tuple[Sighting, ...]:
        """Return what all runs have seen; read anew when the file has changed."""
        if self._path is None:
            return ()
        try:
            found = self._path.stat()
        except OSError:
            return ()
        stamp = (found.st_mtime_ns, found.st_size)
        if stamp != self._stamp:
            self._stamp, self._read = stamp, read_market(self._path)
        return self._read

    def asked(self, attempt: AttemptRecord) -> None:
        """Note that nodes are asked for."""
        self._note([self._sighting(attempt, ASKED, attempt.intended_at)])

    def refused(self, attempt: AttemptRecord, at: float) -> None:
        """Note that they were not to be had."""
        self._note([self._sighting(attempt, REFUSED, at)])

    def update(self, record: RunRecord) -> None:
        """Note which nodes came, and which were taken or given back, since the last time."""
        if self._path is None:
            return
        new = [
            each
            for attempt in record.attempts
            for each in self._life(attempt)
            if each.key not in self._known
        ]
        self._known |= {each.key for each in new}
        self._note(new)

    def _life(self, attempt: AttemptRecord) -> list[Sighting]:
        begun_at = attempt.started_at if attempt.up_at is None else attempt.up_at
        if begun_at is None or attempt.in_place:
            return []
        life = [self._sighting(attempt, GRANTED, begun_at)]
        end = attempt.end
        if end is not None and not end.leaving and end.reason not in _NEVER_CAME:
            kind = LOST if was_taken(attempt) else LEFT
            age_s = max(0.0, end.gone_at - begun_at)
            life.append(self._sighting(attempt, kind, max(begun_at, end.gone_at), age_s))
        return life

    def _sighting(
        self, attempt: AttemptRecord, kind: str, at: float, age_s: float | None = None
    ) -> Sighting:
        accelerator, gpus = accelerator_of(self._record, attempt.offer)
        return Sighting(
            at=at,
            kind=kind,
            place=place_name(attempt.offer),
            accelerator=accelerator,
            gpus=gpus,
            nodes=attempt.nodes,
            market=attempt.offer.market.value,
            usd_per_h=attempt.offer.price_usd_per_h,
            age_s=age_s,
            run=self._run,
            attempt=attempt.number,
        )

    def _note(self, sightings: list[Sighting]) -> None:
        if self._path is not None:
            note_market(self._path, sightings)
