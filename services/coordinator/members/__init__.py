"""Keeps the members' records, secrets and queues; the pool feeds it."""
