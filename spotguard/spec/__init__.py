"""What the user asked for: each setting checked, with its origin; `sources.resolve` begins."""
