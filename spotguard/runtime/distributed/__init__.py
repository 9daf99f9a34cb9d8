"""What ranks do together: gradients, words between them, who waits for whom."""
