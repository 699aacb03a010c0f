"""Sending a run's metrics, samples and warnings to experiment trackers, from a process that nothing waits for."""
