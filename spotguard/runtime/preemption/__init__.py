"""What can end this process early, and how all ranks leave at the same step."""
