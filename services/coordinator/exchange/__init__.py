"""Leases, checks, scores and batches groups, from admission to training. One module for each kind of request."""
