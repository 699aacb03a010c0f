"""Runs episodes of several turns with the user's environments and agents, and records the tokens of every turn."""
