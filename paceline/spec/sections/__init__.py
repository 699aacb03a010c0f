"""The sections of a run's spec, one file for each group of keys."""
