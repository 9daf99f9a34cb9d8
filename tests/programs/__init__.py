"""Test programs that are started by hand or by make: they run for long, or on other Pythons."""
