"""A rank's work on one run: its steps, their publishing, checkpoints and reports."""
