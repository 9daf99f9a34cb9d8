"""Which samples of an interrupted epoch are read on another number of ranks."""
