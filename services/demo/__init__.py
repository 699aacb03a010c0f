"""`paceline demo`: a small model first imitates a teacher who makes mistakes (supervised), then asynchronous GRPO with
a verifiable reward makes it better than its teacher. Both use the services that train large models."""
