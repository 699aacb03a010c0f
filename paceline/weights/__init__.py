"""Formats of weights that learner and rollout workers share: manifests, links, and the store."""
