"""What `spotguard checkpoints` does with what is saved."""
