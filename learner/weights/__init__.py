"""Publishing weights: by the agents of hosts, or through the store."""
