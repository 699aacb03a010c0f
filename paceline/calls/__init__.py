"""Calls of the services: addresses, connections, tokens, errors, when to try again."""
