"""User code in processes of its own: loading it, limits, and calls with time limits."""
