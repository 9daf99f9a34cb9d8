"""The job's folder as it was approved: what is copied of it, once, and what nodes get each time."""
