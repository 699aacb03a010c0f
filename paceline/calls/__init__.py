"""Makes calls to services: addresses, connections, tokens, errors and back-off."""
