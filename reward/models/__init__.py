"""Reward models in the pool: each in a process of its own, shared by all processes of a worker that run functions."""
