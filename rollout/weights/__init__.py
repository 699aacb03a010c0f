"""Receiving weights, over a link or from the object store, and the layout that a model requires."""
