"""A profile of some steps: asked for through the run store, read, and told in words with levers."""
