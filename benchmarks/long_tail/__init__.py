"""Timed stand-ins for `benchmarks/long_tail.py`: an engine and a trainer that cost time in place of arithmetic."""
