"""Samples and packed batches, from groups and examples."""
