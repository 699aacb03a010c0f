"""`paceline demo`: the whole system on one machine, from a blank model to a reward that rises, in a few minutes.

A small model first imitates a teacher who makes mistakes (supervised), then asynchronous GRPO with a verifiable reward
takes it beyond its teacher. Both go through the same services that train large models.
"""
