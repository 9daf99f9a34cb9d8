"""Saving the training state and restoring it."""
