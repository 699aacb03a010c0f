"""A worker's connection to the coordinator, its assigned run, and its numbers."""
