"""A learner on several hosts: which host is which, how they meet, and the end of a session everywhere."""
