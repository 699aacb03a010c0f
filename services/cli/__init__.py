"""The command line `paceline`."""
