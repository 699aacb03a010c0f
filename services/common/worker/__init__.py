"""A worker's connection to the coordinator, the run that it is assigned, and its numbers."""
