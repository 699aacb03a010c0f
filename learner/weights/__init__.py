"""Publishing weights: through the relays of hosts, or through the object store."""
