"""Prepares a data set before a run: the user's own function on rows, and filters."""
