"""Bundles: the reward functions, data and other files that travel with a run, named by their SHA-256."""
