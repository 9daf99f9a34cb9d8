"""Nodes as the journal knows them: offers, what they are made of, one for the controller alone."""
