"""The process around a job: its settings, identity, clock and surroundings."""
