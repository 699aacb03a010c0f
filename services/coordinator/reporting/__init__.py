"""Reporting on a run: events, metrics, files, and the reason why nothing moves."""
