"""Model, objectives, packing, optimizer, checkpoints, publishing weights. Knows no server."""
