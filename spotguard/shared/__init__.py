"""What job and controller both compute with: batches, hazards, addresses, units, a steady clock."""
