"""Pure functions from pictures of a run to what rich prints. No I/O, no clock."""
