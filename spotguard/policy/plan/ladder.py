"""The node ladder: with how many nodes to try, and in which order."""

from __future__ import annotations


def node_ladder(min_nodes: int, max_nodes: int) -> tuple[int, ...]:
    """Return the node counts to ask for, the most first.

    Raises:
        ValueError: the range is empty or begins below 1.
    """
    if not 1 <= min_nodes <= max_nodes:
        raise ValueError(f"not a range of nodes: {min_nodes}:{max_nodes}")
    return tuple(range(max_nodes, min_nodes - 1, -1))


def affordable_rungs(
    ladder: tuple[int, ...],
    *,
    price_usd_per_h: float | None,
    left_usd: float | None,
    least_s: float,
) -> tuple[int, ...]:
    """Return the rungs on which `left_usd` lasts for `least_s` seconds or more.

    All of them when the price is unknown or there is no budget: what to do about an unknown price
    is decided elsewhere (`money.check_budget`).
    """
    if price_usd_per_h is None or left_usd is None:
        return ladder
    return tuple(n for n in ladder if n * price_usd_per_h * least_s / 3600 <= left_usd)
