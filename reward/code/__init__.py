"""Scores programs by their tests: finds the program in a completion, parses the tests of a row, runs them in a sandbox."""
