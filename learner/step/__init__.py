"""One training step, from its plan to the optimizer."""
