"""Conversations as tokens and back: prompts, what a turn adds to them, and what the model's tokens say."""
