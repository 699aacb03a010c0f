"""The way by an object store: the learner's ranks write snapshots and deltas, each engine reads at its pace."""
