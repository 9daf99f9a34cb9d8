"""The ranks of a job on one node: started, told and ended as torchrun does it, without torch."""
