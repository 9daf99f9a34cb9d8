"""What a node draws, and how much CO2e that causes: estimates that name their sources."""
