"""From a preemption to the first new step."""
