"""Files and folders: local or in a store, a run's own, and those that reward functions may come from."""
