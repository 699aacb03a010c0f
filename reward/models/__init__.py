"""Runs reward models in the pool, each in a separate process that all function processes of a worker share."""
