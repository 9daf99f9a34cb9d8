"""What a node writes into the run store: events and heartbeats."""
