"""What a run's report and its live page are made of."""
