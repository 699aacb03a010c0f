"""Formats of weights that learner and rollout workers share: manifests, what the agents of hosts speak, and the store."""
