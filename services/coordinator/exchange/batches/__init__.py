"""Batches of a step: which groups make one, its delivery, its receipts, and what undoes it."""
