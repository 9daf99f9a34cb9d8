"""Folders that come back on the next node: kept in the run store while an attempt trains.

`scan` says which files count, `listing` how they are written down and proven, `keeping` stores
what has changed, `restoring` brings all back before the script starts, `tidying` deletes what
nothing refers to. `node` is what the agent of a node calls.
"""
