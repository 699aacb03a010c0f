"""Code that all services share: servers, membership, options, reports."""
