"""Episodes of several turns: runs the user's environments and agents and records the tokens of every turn."""
