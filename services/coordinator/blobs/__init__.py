"""The store of the files that runs need, by their SHA-256, beneath the coordinator's directory."""
