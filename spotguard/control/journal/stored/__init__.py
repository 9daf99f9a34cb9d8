"""What the run store says of a run, beside its jobs' own events: moves, launches, logs."""
