"""How many workers a pool needs to keep the learner fed: a pure policy and what it advises in words."""
