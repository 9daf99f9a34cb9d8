"""What `status`, `history` and the live view show of a run."""
