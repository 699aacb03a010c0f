"""Commands that start, follow and end runs."""
