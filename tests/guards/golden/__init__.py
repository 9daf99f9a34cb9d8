"""The public contract as it is on record: what others build on and no change may touch by accident.

Each part of it is a file beside this one, made from the code by `python -m tests.guards.golden`. A
test compares them.
"""
