"""Commands that read the records of runs: no coordinator is needed."""
