"""Smoke before money: a script's first steps on this machine's CPU, its save and its restore."""
