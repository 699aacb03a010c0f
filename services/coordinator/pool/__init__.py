"""Lets workers join and leave, assigns runs to them, and handles their reports."""
