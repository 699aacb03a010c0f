"""Sends requests to HTTP services that score completions: judges, and reward models behind a server."""
