"""Reads and writes local files, object stores and caches, and names the files of a run."""
