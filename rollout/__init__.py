"""Generates completions: engines, sampling, receiving weights. Independent of servers and learner."""
