"""S3, and what speaks like it."""
