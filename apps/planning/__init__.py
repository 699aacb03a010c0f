"""Plans of capacity: how fast a run is on given processors, what limits it, and what it costs. Pure arithmetic."""
