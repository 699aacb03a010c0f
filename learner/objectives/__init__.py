"""Losses: what makes completions likelier, as pure functions, and which algorithm takes which."""
