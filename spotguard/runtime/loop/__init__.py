"""The loop over the optimizer steps of an attempt, by steps and by epochs."""
