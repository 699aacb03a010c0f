"""The policy as a module: packed attention, log-probabilities, adapters."""
