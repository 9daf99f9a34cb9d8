"""What settings must be together, once each of them makes sense alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotguard.errors import SpecError
from spotguard.spec.infra import LOCAL, gpu_alternatives, kind_of

if TYPE_CHECKING:
    from spotguard.spec.model.job import JobSpec


def check_together(spec: JobSpec, on_demand_origin: str) -> None:
    """Let a job pass whose settings go together; `on_demand_origin` says who gave on_demand_infra.

    Raises:
        SpecError: two of them do not; names one, and the way out.
    """
    _check_kinds(spec, on_demand_origin)
    _check_prices(spec)
    for index in range(len(spec.phases)):
        _check_phase(spec, index)


def _check_phase(spec: JobSpec, index: int) -> None:
    """Refuse a phase that the job cannot be in, before the first one costs money."""
    try:
        spec.in_phase(index)
    except SpecError as problem:
        words = f"phase {index + 1} cannot be: {problem.message}"
        raise SpecError("phases", words, hint=problem.hint) from None


def _check_prices(spec: JobSpec) -> None:
    """Refuse one price for several kinds of GPU: it would be billed for whichever is had."""
    if spec.infra == LOCAL or len(gpu_alternatives(spec.gpus)) < 2:
        return
    for key, price in (
        ("price", spec.price_usd_per_h),
        ("on_demand_price", spec.on_demand_usd_per_h),
    ):
        if price is not None:
            raise SpecError(
                key,
                f"given {price:g}, but gpus is {spec.gpus!r}: several kinds, each with its own",
                hint="leave it out, so that each one's is looked up, or name one kind of GPU",
            )


def _check_kinds(spec: JobSpec, origin: str) -> None:
    """Refuse on-demand places for which nodes and stores would have to be prepared differently.

    Local nodes are bought nowhere: there, what a file says of other places does no harm.
    """
    elsewhere = spec.on_demand_infra
    if elsewhere is None or spec.infra == LOCAL or kind_of(elsewhere) == kind_of(spec.infra):
        return
    by = f" ({origin})" if origin else ""
    raise SpecError(
        "on_demand_infra",
        f"given {elsewhere!r}{by}, but infra is {spec.infra!r}, where nodes and stores are "
        "prepared differently",
        hint="name places of one kind for both: clouds, kubernetes, or slurm",
    )
