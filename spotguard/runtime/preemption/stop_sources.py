"""Everything that can tell this rank to stop, turned into requests for the watcher.

SIGTERM reaches every rank by itself. The cloud's metadata service and a notice file are asked by
one rank per node. The run's own limits (budget, deadline) are kept by every rank, so that the job
stops itself when the controller is dead.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from spotguard.events.event import JobEvent
from spotguard.events.states import EndReason
from spotguard.runtime.preemption.fork_signals import hold_ctrl_c_while_forking
from spotguard.runtime.preemption.notices import FileNotices, Notice, NoticeSource, notice_source
from spotguard.runtime.preemption.signals import SignalWatch
from spotguard.runtime.preemption.stop_consensus import StopRequest, StopWatch
from spotguard.runtime.preemption.worker_signals import leave_workers_to_their_job
from spotguard.runtime.process import clock
from spotguard.shared.units import to_iso

if TYPE_CHECKING:
    from spotguard.runtime.process.settings import Settings
    from spotguard.runtime.reporting.node_reports import Reporter

log = logging.getLogger("spotguard")

_SILENT_AFTER = 5
_WAYS_TO_METADATA = {
    "aws": "let the job reach http://169.254.169.254, in a container by the instance's metadata "
    "option HttpPutResponseHopLimit=2",
    "gcp": "let the job reach http://169.254.169.254 (no firewall rule, proxy or workload identity "
    "in between)",
    "azure": "let the job reach http://169.254.169.254 without a proxy",
}
"""How a metadata service that does not answer is reached after all, by its source's name."""
_SLOW_POLL_S = 5.0
_OUTLIVED_S = 30.0
_JOIN_S = 1.0  # a source may be asked just now, and be slow to answer
_NEARER_S = 2.0
"""By how much a deadline must come nearer to be told: it may be recomputed at each look."""
_ASK_S = 0.3  # a metadata service answers within milliseconds, and SIGTERM leaves 15 s or more


class Listener:
    """Starts what listens on this rank; all of it runs in daemon threads."""

    def __init__(self, settings: Settings, watch: StopWatch, reporter: Reporter) -> None:
        self._settings = settings
        self._watch = watch
        self._reporter = reporter
        self._closed = threading.Event()
        self.sigterm: StopRequest | None = None
        """What the first SIGTERM asked for."""
        self._noticed: dict[str, float | None] = {}
        """The notices in force: until when there is time, by the source that says so."""
        self._began_at = clock.now()
        self._signals: SignalWatch | None = None
        self._threads: list[threading.Thread] = []
        self._timers: list[threading.Timer] = []
        if threading.current_thread() is threading.main_thread():
            self._signals = SignalWatch(self._on_sigterm)
            hold_ctrl_c_while_forking()
        leave_workers_to_their_job()
        for at, reason, message in (
            (settings.budget_stop_at, EndReason.BUDGET, "the money of this attempt is used up"),
            (settings.deadline_stop_at, EndReason.DEADLINE, "the deadline has come"),
        ):
            if at is not None:
                self._stop_later(at, StopRequest(reason=reason, message=message))
        if settings.local_rank == 0:
            cloud = notice_source(settings.metadata)
            file = FileNotices(settings.notice_file) if settings.notice_file else None
            for source in (cloud, file):
                if source is not None:
                    self._start(self._poll, source)

    @property
    def is_deaf(self) -> bool:
        """True if signals are not heard, for this is not the main thread."""
        return self._signals is None

    def drain(self) -> None:
        """Block until each signal that came has become a request; not for long."""
        if self._signals is not None:
            self._signals.drain(2 * _ASK_S)

    def hold(self, *, loop: bool = True) -> None:
        """Let no SIGTERM handler of the script's raise, in its `loop` or as it leaves; or let it.

        Elsewhere than in the main thread nothing of it changes.
        """
        if self._signals is None or threading.current_thread() is not threading.main_thread():
            return
        if loop:
            self._signals.hold()
        else:
            self._signals.let_go()

    def close(self, *, leaving: bool = False) -> None:
        """Stop listening; signals go where they went before, if the process is not `leaving`."""
        self._closed.set()
        for timer in self._timers:
            timer.cancel()
        for thread in [] if leaving else [*self._threads, *self._timers]:
            thread.join(_JOIN_S)
        if self._signals is not None:
            self._signals.close(leaving=leaving)

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(
            target=target,  # type: ignore[arg-type]
            args=args,
            name="spotguard-listen",
            daemon=True,
        )
        thread.start()
        self._threads.append(thread)

    def _stop_later(self, at: float, request: StopRequest) -> None:
        # Counted down on the monotonic clock: a wall clock that jumps must not spend money.
        timer = threading.Timer(max(at - clock.now(), 0.0), self._watch.request, [request])
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _on_sigterm(self) -> None:
        request = self._sigterm_request()
        self.sigterm = self.sigterm or request
        self._watch.request(request)

    def _sigterm_request(self) -> StopRequest:
        """Return what a SIGTERM asks for now: perhaps what the cloud has just announced."""
        now = clock.now()
        deadline = now + self._settings.grace_s
        if self._noticed_until is None and (notice := self._ask_why()) is not None:
            until = min(deadline, max(notice.deadline_at or deadline, now))
            self._heed(notice.source, until)
            return _request_of(replace(notice, deadline_at=until))
        if self._noticed_until is not None:
            # The end of an announced grace: the notice's own deadline may be nearer.
            deadline = min(deadline, max(self._noticed_until, now))
        return StopRequest(
            reason=EndReason.TERMINATED, message="SIGTERM", warned_at=now, deadline_at=deadline
        )

    @property
    def _noticed_until(self) -> float | None:
        return min((until for until in list(self._noticed.values()) if until), default=None)

    def _ask_why(self) -> Notice | None:
        """Ask the cloud once: it may have announced this very end a moment ago, to nobody yet."""
        source = notice_source(self._settings.metadata)
        if source is None:
            return None
        answers: list[Notice] = []

        def ask() -> None:
            with contextlib.suppress(Exception):  # no answer is an answer
                found = self._heeded(source.check())
                if found is not None and not found.advisory:
                    answers.append(found)

        thread = threading.Thread(target=ask, name="spotguard-ask", daemon=True)
        thread.start()
        thread.join(_ASK_S)
        return answers[0] if answers else None

    def _heeded(self, notice: Notice | None) -> Notice | None:
        """Return the notice, unless its time had come before this process began.

        The machine has outlived it: the notice is of an earlier life of it, or of its hibernation.
        """
        if notice is None or notice.deadline_at is None:
            return notice
        return None if notice.deadline_at < self._began_at - _OUTLIVED_S else notice

    def _poll(self, source: NoticeSource) -> None:
        """Ask `source` until the process ends; report what changes: a notice, its withdrawal."""
        known: Notice | None = None
        failures = 0
        while not self._closed.is_set():
            try:
                found = self._heeded(source.check())
                failures = 0
            except Exception as problem:  # noqa: BLE001 - no answer may end the watch
                failures += 1
                if failures == _SILENT_AFTER:
                    message = f"the {source.name} notice source does not answer: {problem}"
                    if source.name in _WAYS_TO_METADATA:
                        message += (
                            "; until it does, a node that is taken costs the work since the last "
                            f"save: {_WAYS_TO_METADATA[source.name]}"
                        )
                    log.warning("%s", message)
                    self._reporter.event(JobEvent.WARNING, message=message)
                self._closed.wait(1.0 if failures < _SILENT_AFTER else _SLOW_POLL_S)
                continue
            if found != known and (not _same(found, known) or _is_nearer(found, known)):
                self._changed(source, found)
                known = found
            self._closed.wait(source.poll_s)

    def _mark_leaving(self, *, leaving: bool) -> None:
        """Tell whoever started this process whether its node is about to be taken."""
        if self._settings.leaving_file is None:
            return
        with contextlib.suppress(OSError):
            if leaving:
                Path(self._settings.leaving_file).touch()
            else:
                Path(self._settings.leaving_file).unlink(missing_ok=True)

    def _changed(self, source: NoticeSource, notice: Notice | None) -> None:
        if notice is None or (notice.advisory and source.name in self._noticed):
            log.info("the %s notice was withdrawn", source.name)
            self._reporter.event(JobEvent.WITHDRAWN, source=source.name)
            self._take_back(source)
        if notice is None:
            return
        self._reporter.event(
            JobEvent.NOTICE,
            source=notice.source,
            action=notice.action,
            deadline_at=notice.deadline_at and to_iso(notice.deadline_at),
            detail="a recommendation only" if notice.advisory else "",
        )
        log.info("%s announces: %s", notice.source, notice.action)
        if notice.advisory:
            return
        self._heed(source.name, notice.deadline_at)
        self._watch.request(_request_of(notice))

    def _heed(self, source: str, until: float | None) -> None:
        self._noticed[source] = until
        self._mark_leaving(leaving=True)

    def _take_back(self, source: NoticeSource) -> None:
        """Forget what this source has asked for; another one's notice stays in force."""
        self._noticed.pop(source.name, None)
        if not self._noticed:
            self._mark_leaving(leaving=False)
        self._watch.withdraw(source.name)


def _request_of(notice: Notice) -> StopRequest:
    return StopRequest(
        reason=EndReason.PREEMPTED,
        message=f"{notice.source}: {notice.action}",
        warned_at=clock.now(),
        deadline_at=notice.deadline_at,
        source=notice.source,
    )


def _same(one: Notice | None, other: Notice | None) -> bool:
    """Return True for the same notice seen twice (a deadline may be recomputed each time)."""
    if one is None or other is None:
        return one is other
    return (one.source, one.action, one.advisory) == (other.source, other.action, other.advisory)


def _is_nearer(one: Notice | None, other: Notice | None) -> bool:
    """Return True if `one` leaves clearly less time than `other`, or says at last how much."""
    if one is None or other is None or one.deadline_at is None:
        return False
    return other.deadline_at is None or one.deadline_at < other.deadline_at - _NEARER_S
