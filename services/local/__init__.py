"""All services of one host, for `paceline up`, the demo and the end-to-end tests."""
