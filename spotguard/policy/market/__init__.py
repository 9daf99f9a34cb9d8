"""What is known of spot markets: the bundled records, and what own runs have seen."""
