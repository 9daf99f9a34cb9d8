"""Futures of all zones, drawn from what is known: who can be had at each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from spotguard.policy.market.hazard import Evidence, Hazard

OLDEST = 512
"""Steps of age after which the rates change no more."""
PAST_STEP_S = 60.0
"""What nobody saw, a day at most, is lived through in steps of a minute at least."""


def draw_futures(
    *,
    hazard: Hazard,
    evidence: Evidence,
    up: NDArray[np.bool_],
    age_s: NDArray[np.float64],
    unseen_s: NDArray[np.float64],
    step_s: float,
    steps: int,
    count: int,
    rng: np.random.Generator,
) -> NDArray[np.bool_]:
    """Return who can be had: shape (steps, problems, futures, zones).

    Step 0 is now: what has just been seen is certain. A zone that has not been seen for a while
    lives through that time first; one that was never seen is as likely up as in the long run.

    Args:
        hazard: rates by age.
        evidence: what each zone has shown of itself, of shape (problems, zones).
        up: the last state that was seen, of shape (problems, zones).
        age_s: for how long it had lasted then.
        unseen_s: how long ago that was; infinite if never.
        step_s: length of a step.
        steps: how many.
        count: futures per problem.
        rng: where chance comes from.
    """
    problems, zones = up.shape
    shape, rate = evidence.gamma()
    drawn = (problems, count, zones, 2)
    frailty = (rng.standard_gamma(np.broadcast_to(shape[:, None], drawn)) / rate[:, None]).astype(
        np.float32
    )
    slow, quick = frailty[..., 0], frailty[..., 1]
    state = np.broadcast_to(up[:, None], (problems, count, zones)).copy()
    never = ~np.isfinite(unseen_s)
    if never.any():
        back, taken = _long_run(hazard)
        chance = back * slow / (back * slow + taken * quick)
        guess = rng.random(state.shape) < chance
        state = np.where(never[:, None], guess, state)
    past_s = max(step_s, PAST_STEP_S)
    age = _in_steps(np.broadcast_to(age_s[:, None], state.shape), past_s)
    lag = np.where(never, 0.0, np.minimum(unseen_s, 86_400.0)) / past_s
    before = int(np.ceil(lag.max(initial=0.0)))
    made = np.empty((steps, problems, count, zones), dtype=bool)
    flat = hazard.step_table(past_s, OLDEST).astype(np.float32).ravel()
    for step in range(-before, steps):
        if step == 0 and past_s > step_s:
            age = _in_steps(age * past_s, step_s)
            flat = hazard.step_table(step_s, OLDEST).astype(np.float32).ravel()
        if step >= 0:
            made[step] = state
        mean = flat[state * OLDEST + age] * np.where(state, quick, slow)
        flips = rng.random(state.shape, dtype=np.float32) < -np.expm1(-mean)
        if step < 0:  # only the zones that have not been seen since then live through it
            flips &= (lag >= -step)[:, None]
        state = state ^ flips
        age = np.where(flips, 0, np.minimum(age + 1, OLDEST - 1))
    return made


def _in_steps(age_s: NDArray[Any], step_s: float) -> NDArray[np.int32]:
    return np.minimum(age_s / step_s, OLDEST - 1).astype(np.int32)


def _long_run(hazard: Hazard) -> tuple[float, float]:
    """Return the mean rates of coming back and of being taken, by mean length of the states."""
    grid_s = np.arange(0.0, 2 * 86_400.0, 600.0)
    lengths_h = []
    for state in (0, 1):
        alive = np.exp(-hazard.cumulative_many(state, grid_s))
        lengths_h.append(max(1e-3, float(alive.sum()) / 6))
    return 1 / lengths_h[0], 1 / lengths_h[1]
