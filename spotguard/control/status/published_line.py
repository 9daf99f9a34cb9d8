"""One line on a run as its controller wrote it into the store, read back.

The controller's lease carries it, so that a list of a team's runs costs one request for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spotguard.control.status.view import RunSummary
from spotguard.events.states import RunState
from spotguard.events.untrusted import Refused, amount, instant, integer, needed, text

if TYPE_CHECKING:
    from collections.abc import Mapping

_STATES = {state.value: state for state in RunState}


def read_told(body: Mapping[str, Any], run_id: str) -> RunSummary:
    """Return the line that `document(summary)` wrote.

    Raises:
        Refused: it makes no sense, or is of another run.
    """
    if text(body, "run_id") != run_id:
        raise Refused("it is of another run")
    return RunSummary(
        run_id=run_id,
        name=needed(text(body, "name"), "name"),
        state=needed(_STATES.get(text(body, "state") or ""), "state"),
        created_at=needed(instant(body, "created_at"), "instant"),
        spent_usd=amount(body, "spent_usd"),
        demo_prices=body.get("demo_prices") is True,
        budget_usd=amount(body, "budget_usd"),
        rate_usd_per_h=amount(body, "rate_usd_per_h"),
        next_alert=text(body, "next_alert"),
        step=integer(body, "step", low=0),
        total_steps=integer(body, "total_steps", low=0),
        attempts=integer(body, "attempts", low=0) or 0,
        interruptions=integer(body, "interruptions", low=0) or 0,
        queued=text(body, "queued"),
    )
