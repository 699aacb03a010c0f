"""The policy as a module, with packed attention, log-probabilities and adapters."""
