"""Commands on registered models."""
