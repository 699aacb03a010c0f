"""Commands that measure models outside of runs and compare the results."""
