"""Which samples a rank reads at a step, and how large its batches are."""
