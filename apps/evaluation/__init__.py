"""Evaluation of one model without a run: `paceline eval`."""
