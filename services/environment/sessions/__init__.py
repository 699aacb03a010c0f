"""The HTTP server of agents: each sample of a group has a URL of its own, whose requests are its turns."""
