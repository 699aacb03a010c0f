"""Environment workers: they hold the leases of runs with an environment and run the episodes."""
