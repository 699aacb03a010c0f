"""Weights by an object store: the learner's ranks write snapshots and deltas, and each engine reads at its pace."""
