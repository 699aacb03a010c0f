"""Trains the policy and publishes its weights: model, objectives, packing, optimizer, checkpoints. Knows no server."""
