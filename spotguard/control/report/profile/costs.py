"""Where the time of the recorded steps went: each instant belongs to one kind of cost. Pure.

While the GPU is at work an instant belongs to what it does, and a sum over the ranks counts only
where nothing else runs beside it. While it idles, or where there is none, the instant belongs to
what the loop's thread does.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from spotguard.control.report.profile.trace import BACKWARD
from spotguard.events import profile as marks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from spotguard.control.report.profile.trace import Span, StepTrace

SMALL_US: Final = 20.0
"""An operation that takes less is hardly worth what it takes to begin it."""
_SMALL_KERNEL_US = 10.0


class CostKind(str, Enum):
    """What time is spent on."""

    DATA = "data"
    SAVING = "saving"
    RANKS = "ranks"
    OPTIMIZER = "optimizer"
    ATTENTION = "attention"
    PRODUCTS = "products"
    COPIES = "copies"
    SYNC = "sync"
    SMALL = "small"
    OTHER = "other"
    PYTHON = "python"


_MARKED: Final = {
    marks.DATA: CostKind.DATA,
    marks.SAVING: CostKind.SAVING,
    marks.RANKS: CostKind.RANKS,
    marks.STEP: CostKind.PYTHON,
}
_FINAL: Final = frozenset({CostKind.DATA, CostKind.SAVING, CostKind.RANKS})
"""All that is done within these belongs to them."""
_COVERING: Final = _FINAL | {CostKind.OPTIMIZER, CostKind.ATTENTION}
"""All that is done within these does so, too, but for what is final."""
_OF_OPERATIONS: Final = tuple(
    (re.compile(pattern, re.I), kind)
    for pattern, kind in (
        (r"^c10d::|^(gloo|nccl|ucc|mpi):|DistributedDataParallel\.(reduce|wait)", CostKind.RANKS),
        (r"^Optimizer\.", CostKind.OPTIMIZER),
        (r"scaled_dot_product|ScaledDotProduct|flash_attn|_softmax(_backward)?(_data)?$",
         CostKind.ATTENTION),
        (r"(^|::)_?(addmm|mm|bmm|baddbmm|matmul|linear|einsum|mkldnn_\w+|thnn_conv\w*|"
         r"slow_conv\w*|\w*convolution\w*|conv\dd|lstm|gru|_?addmm_activation)$",
         CostKind.PRODUCTS),
        (r"(^|::)(item|_local_scalar_dense|nonzero|is_nonzero)$|Synchronize$", CostKind.SYNC),
        (r"(^|::)(copy_|_to_copy|pin_memory|contiguous|clone)$|Memcpy", CostKind.COPIES),
    )
)  # fmt: skip
_OF_KERNELS: Final = tuple(
    (re.compile(pattern, re.I), kind)
    for pattern, kind in (
        (r"nccl", CostKind.RANKS),
        (r"^mem(cpy|set)", CostKind.COPIES),
        (r"flash|fmha|attention|softmax", CostKind.ATTENTION),
        (r"multi_tensor_apply|adam|sgd", CostKind.OPTIMIZER),
        (r"gemm|cutlass|xmma|wgmma|cudnn|conv|cublas|splitK", CostKind.PRODUCTS),
    )
)


@dataclass
class Spent:
    """What one kind of cost took."""

    us: float = 0.0
    by_name: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: int = 0


@dataclass
class Costs:
    """The time of the steps, shared out; all in microseconds."""

    total_us: float
    steps: int
    spent: dict[CostKind, Spent]
    gpu_busy_us: float | None
    """None without a GPU."""
    pageable: bool = False
    """True if copies to the GPU come from memory that is not pinned."""

    @property
    def own_us(self) -> float:
        """What this rank took for itself: all but the wait for the others."""
        waited = self.spent.get(CostKind.RANKS)
        return self.total_us - (waited.us if waited else 0.0)

    def share(self, kind: CostKind) -> float:
        """Return the share (0..1) of the steps that went into a kind of cost."""
        spent = self.spent.get(kind)
        return spent.us / self.total_us if spent and self.total_us else 0.0


class _Piece(NamedTuple):
    """An instant after the other that belongs to one kind."""

    start: float
    end: float
    kind: CostKind
    name: str


def costs_of(trace: StepTrace) -> Costs:
    """Return where the time of a trace's steps went."""
    spent: dict[CostKind, Spent] = defaultdict(Spent)

    def take(pieces: Iterable[_Piece]) -> float:
        taken = 0.0
        for piece in pieces:
            spent[piece.kind].us += piece.end - piece.start
            spent[piece.kind].by_name[piece.name] += piece.end - piece.start
            taken += piece.end - piece.start
        return taken

    loop = _with_backward(_Thread(spent).pieces(trace.loop), _Thread(spent).pieces(trace.backward))
    busy = list(_of_device(trace.device))
    busy_us = take(_within(busy, [(step.start, step.end) for step in trace.steps]))
    idle = _within(loop, _gaps(busy, trace.steps[0].start, trace.steps[-1].end))
    take(map(_begins, idle) if busy else idle)
    return Costs(
        total_us=sum(step.end - step.start for step in trace.steps),
        steps=len(trace.steps),
        spent=dict(spent),
        gpu_busy_us=busy_us if trace.device else None,
        pageable=any("Pageable -> Device" in span.name for span in trace.device),
    )


def _with_backward(loop: list[_Piece], backward: list[_Piece]) -> list[_Piece]:
    """Return what the loop's thread does, and what another does for it while it waits for that."""
    if not backward:
        return loop
    waits = [piece for piece in loop if piece.kind is CostKind.PYTHON]
    done = list(_within(backward, [(piece.start, piece.end) for piece in waits]))
    left = _within(waits, _gaps(done, float("-inf"), float("inf")))
    return sorted([*(piece for piece in loop if piece.kind is not CostKind.PYTHON), *done, *left])


def _begins(piece: _Piece) -> _Piece:
    """Return what the loop's thread does while the GPU idles: it only begins operations there."""
    if piece.kind in _FINAL or piece.kind in (CostKind.SYNC, CostKind.PYTHON):
        return piece
    return piece._replace(kind=CostKind.SMALL)


class _Thread:
    """Goes through what a thread did, and cuts its time where what is innermost changes."""

    def __init__(self, spent: dict[CostKind, Spent]) -> None:
        """`spent` is where operations are counted."""
        self._spent = spent
        self._open: list[tuple[Span, CostKind]] = []
        self._at = 0.0
        self._pieces: list[_Piece] = []

    def pieces(self, spans: Iterable[Span]) -> list[_Piece]:
        """Return the pieces by time; what lies in no step is left out."""
        for span in sorted(spans, key=lambda each: (each.start, -each.end)):
            while self._open and self._open[-1][0].end <= span.start:
                self._close()
            if not (self._open or span.name == marks.STEP or span.name.startswith(BACKWARD)):
                continue
            self._until(span.start)
            kind = _kind_of(span, self._open[-1][1] if self._open else CostKind.PYTHON)
            self._spent[kind].calls += 1
            self._open.append((span, kind))
        while self._open:
            self._close()
        return self._pieces

    def _close(self) -> None:
        self._until(self._open[-1][0].end)
        self._open.pop()

    def _until(self, instant: float) -> None:
        """Give the time up to here to what is innermost."""
        if self._open and instant > self._at:
            span, kind = self._open[-1]
            self._pieces.append(_Piece(self._at, instant, kind, span.name))
        self._at = max(self._at, instant)


def _kind_of(span: Span, above: CostKind) -> CostKind:
    """Return what an operation belongs to, within one of the kind `above`."""
    if above in _FINAL:
        return above
    kind = _MARKED.get(span.name) or _first(_OF_OPERATIONS, span.name)
    if kind in _FINAL or above not in _COVERING:
        return kind or _by_size(span, above)
    return above


def _by_size(span: Span, above: CostKind) -> CostKind:
    if above in (CostKind.PRODUCTS, CostKind.COPIES, CostKind.SYNC):
        return above  # a part of it, such as the view of a matrix
    return CostKind.SMALL if span.end - span.start < SMALL_US else CostKind.OTHER


def _of_device(spans: Iterable[Span]) -> Iterator[_Piece]:
    """Yield what the GPU does, one thing at a time: of several at once what began first.

    Sums over the ranks come last: what they do beside other work costs nothing.
    """
    kinds = [(span, _of_kernel(span)) for span in sorted(spans)]
    work = list(_one_by_one(pair for pair in kinds if pair[1] is not CostKind.RANKS))
    sums = list(_one_by_one(pair for pair in kinds if pair[1] is CostKind.RANKS))
    alone = _within(sums, _gaps(work, float("-inf"), float("inf")))
    yield from sorted([*work, *alone])


def _of_kernel(span: Span) -> CostKind:
    found = _first(_OF_KERNELS, span.name)
    return found or (CostKind.SMALL if span.end - span.start < _SMALL_KERNEL_US else CostKind.OTHER)


def _one_by_one(pairs: Iterable[tuple[Span, CostKind]]) -> Iterator[_Piece]:
    at = float("-inf")
    for span, kind in pairs:
        if span.end > at:
            yield _Piece(max(at, span.start), span.end, kind, span.name)
            at = span.end


def _gaps(pieces: Iterable[_Piece], start: float, end: float) -> list[tuple[float, float]]:
    """Return from `start` to `end` what no piece covers; pieces come by time, and apart."""
    gaps, at = [], start
    for piece in pieces:
        if piece.start > at:
            gaps.append((at, min(piece.start, end)))
        at = max(at, piece.end)
    if at < end:
        gaps.append((at, end))
    return gaps


def _within(pieces: Sequence[_Piece], ranges: Sequence[tuple[float, float]]) -> Iterator[_Piece]:
    """Yield what of the pieces lies in the ranges; both come by time, and apart."""
    first = 0
    for piece in pieces:
        while first < len(ranges) and ranges[first][1] <= piece.start:
            first += 1
        here = first
        while here < len(ranges) and ranges[here][0] < piece.end:
            start, end = max(ranges[here][0], piece.start), min(ranges[here][1], piece.end)
            if end > start:
                yield piece._replace(start=start, end=end)
            here += 1


def _first(table: Iterable[tuple[re.Pattern[str], CostKind]], name: str) -> CostKind | None:
    return next((kind for pattern, kind in table if pattern.search(name)), None)
