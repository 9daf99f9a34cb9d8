"""Policies on recorded or drawn markets, many windows at once."""
