"""What a run knows of its sweep: who pays, what the others' values are, and whether it goes on."""
