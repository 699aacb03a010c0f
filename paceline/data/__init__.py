"""Data sets: rows of prompts, examples of supervised training, and their tokens."""
