"""How a job leaves: every way out of it, and the one word that is written about it."""
