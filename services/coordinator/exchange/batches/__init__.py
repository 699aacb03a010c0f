"""Selects, delivers and replaces the batch of a step, and takes the receipts for it."""
