"""Reward functions and how they run. Knows no server and no learner."""
