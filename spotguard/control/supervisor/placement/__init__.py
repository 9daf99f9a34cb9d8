"""Spot or on demand, and where: what may be asked now, and when paid nodes are given up. Pure."""
