"""Facts about models on which all roles must agree, from names and config.json alone."""
