"""Runs: which one trains, how it begins and ends, and what keeps it from going on."""
