"""Calls of the services: addresses, connections, tokens, errors and back-off."""
