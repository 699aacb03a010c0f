"""Transports requests: the exchange's socket, its pipeline of threads, and the dispatch to handlers."""
