"""Files and folders: local ones, object stores, caches, and the names of a run's files."""
