"""Checks that stand beside the training: what they find is told, and no step waits for them."""
