"""Queues, starts and ends runs, and changes their states in between."""
