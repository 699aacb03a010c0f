"""Encryption of a deployment's files with the operator's key."""
