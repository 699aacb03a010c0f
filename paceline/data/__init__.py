"""Reads data sets: rows of prompts, examples of supervised training, and the tokens of both."""
