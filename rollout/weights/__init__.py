"""Receiving weights, over a link or from the store, and what a model takes of them."""
