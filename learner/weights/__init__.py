"""Publishing weights: over links to each member, or through the store."""
