"""The reward service: score tasks in, rewards out."""
