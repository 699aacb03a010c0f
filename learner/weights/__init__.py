"""Publishing weights: by the relays of hosts, or through the store."""
