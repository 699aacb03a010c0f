"""The number of workers that a pool needs to keep the learner busy: a pure policy, and advice in words."""
