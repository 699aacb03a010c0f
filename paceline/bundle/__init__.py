"""Bundles: the reward functions, data and other files that a run needs, which travel with it by their SHA-256."""
