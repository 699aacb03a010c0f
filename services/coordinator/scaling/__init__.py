"""Decides how many workers a pool needs to keep the learner busy, and explains the decisions."""
