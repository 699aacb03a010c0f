"""All services of one host: what `paceline up`, the demo and the end-to-end tests start."""
