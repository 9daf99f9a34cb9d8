"""What the command line writes to a terminal: consoles, progress, help."""
