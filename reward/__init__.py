"""Reward functions and the processes that run them. Independent of servers and the learner."""
