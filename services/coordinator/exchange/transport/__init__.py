"""The exchange's socket, its pipeline of threads, and the way from a request to its handler."""
