"""Episodes of several turns: the user's environments and agents, the tokens of their turns, and their journal."""
