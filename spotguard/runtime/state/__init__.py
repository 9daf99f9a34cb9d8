"""What belongs to the training state, and how it becomes plain data."""
