"""The reward service: takes score tasks and returns rewards."""
