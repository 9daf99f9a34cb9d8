"""What job and controller both compute with: batches, hazards, addresses, a steady clock."""
