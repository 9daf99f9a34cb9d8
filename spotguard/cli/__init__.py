"""The command line: parses and prints; decides nothing."""
