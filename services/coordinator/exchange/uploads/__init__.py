"""Decodes, checks and stores uploaded groups."""
