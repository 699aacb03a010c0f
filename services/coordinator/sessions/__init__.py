"""Sessions of the learner: their numbers, and the checkpoints that they begin from."""
