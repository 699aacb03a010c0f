"""Commands that read the records of runs, with or without a coordinator."""
