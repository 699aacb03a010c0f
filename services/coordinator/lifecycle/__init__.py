"""Runs: their queue, their start and end, and their states in between."""
