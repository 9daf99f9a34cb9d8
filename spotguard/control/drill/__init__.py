"""`spotguard drill`: proof that a script survives, before money is spent."""
