"""Loops in other shapes than `run.steps`, and scripts that are in none of ours."""
