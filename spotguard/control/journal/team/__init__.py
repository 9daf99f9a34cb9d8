"""The money that all runs of a store stake."""
