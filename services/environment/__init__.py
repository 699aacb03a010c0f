"""Environment workers: lease groups of runs with an environment and run their episodes."""
