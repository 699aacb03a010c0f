"""The relay that brings weights to the workers of a host."""
