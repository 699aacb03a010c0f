"""What a run tells: events, metrics, files, and why nothing moves."""
