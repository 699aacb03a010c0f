"""Code that all services share: server, membership, options, log."""
