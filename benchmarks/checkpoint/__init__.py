"""The checkpoint benchmark: spotguard beside its rivals and the limits of the machine."""
