"""Rewards of programs by their tests: the program in a completion, the tests of a row, and what became of each in a sandbox."""
