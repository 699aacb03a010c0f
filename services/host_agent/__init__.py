"""The agent that brings weights to the workers of a host."""
