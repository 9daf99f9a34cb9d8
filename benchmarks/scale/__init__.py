"""What looking at a very long run costs."""
