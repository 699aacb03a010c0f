"""Receiving weights, by the agent of the host or from the object store, and the layout that a model requires."""
