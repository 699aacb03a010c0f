"""A rank's work on one run: its steps, and what is published, saved and reported of them."""
