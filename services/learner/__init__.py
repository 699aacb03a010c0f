"""The learner service: its launcher, its ranks, and their work on one run."""
