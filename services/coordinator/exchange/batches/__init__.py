"""Batches of a step: selection, delivery, receipts, and what undoes a batch."""
