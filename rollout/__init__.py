"""Generating completions: engines, sampling, receiving weights. Knows no server and no learner."""
