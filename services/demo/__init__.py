"""`paceline demo`: the whole system on one machine, from a blank model to a rising reward, in a few minutes.

A small model first imitates a teacher who makes mistakes (supervised), then asynchronous GRPO with a verifiable reward
makes it better than its teacher. Both use the services that train large models.
"""
