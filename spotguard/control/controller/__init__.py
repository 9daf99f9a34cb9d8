"""The background process that controls runs: who looks after which, how it begins and ends."""
