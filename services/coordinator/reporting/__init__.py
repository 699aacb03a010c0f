"""Reporting on a run: events, metrics, files, and the reason of a stall."""
