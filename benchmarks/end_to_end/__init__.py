"""The parts of the end-to-end benchmark: one workload, and the two sides that run it."""
