"""Optimizers other than torch's own."""
