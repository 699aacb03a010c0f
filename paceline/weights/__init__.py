"""What learner and rollout workers agree on about weights: manifests, links, and the format of the store."""
