"""Bookkeeping of the members: with a clock, and fed by the pool."""
