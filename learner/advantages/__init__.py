"""Advantages: within a group, over the whole batch, and by a value model."""
