"""Weights by host: one agent on each host receives a version once, for all workers there, and passes it on to the next host."""
