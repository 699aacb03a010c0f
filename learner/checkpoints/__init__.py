"""Checkpoints and exports of the learner."""
