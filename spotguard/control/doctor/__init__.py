"""`spotguard doctor`: one look at everything a run will need."""
