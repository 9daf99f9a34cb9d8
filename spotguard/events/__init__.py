"""What both sides share: the words of the run store, its keys, events, states and environment."""
