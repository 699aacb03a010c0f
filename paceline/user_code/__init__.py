"""User code in separate processes: loading it, limits, and calls with time limits."""
