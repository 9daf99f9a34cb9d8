"""Training frameworks with a loop of their own, each by one line; each needs its own extra."""
