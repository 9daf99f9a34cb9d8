"""What is known of a run: its journal, and the record folded from it."""
