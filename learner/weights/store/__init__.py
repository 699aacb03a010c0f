"""The weight store as the learner's ranks write it."""
