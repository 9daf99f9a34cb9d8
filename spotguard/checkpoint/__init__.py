"""The checkpoint format: shards, manifest, lineage, retention. Readable without torch.

`docs/inside/format.md` describes the bytes. All functions take a store that is prefixed to the run.
"""
