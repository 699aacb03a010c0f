"""Processes that start, watch and outlive no other process."""
