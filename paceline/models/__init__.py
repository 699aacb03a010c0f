"""Facts about models that every role must know alike, from names and config.json alone."""
