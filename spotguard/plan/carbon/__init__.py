"""What a node draws, and how much CO2e that causes: estimates whose every factor names its source."""
