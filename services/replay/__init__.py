"""Trains recorded steps again, without services."""
