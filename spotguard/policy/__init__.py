"""Where to run, when to wait, when to pay: pure functions on what is known now."""
