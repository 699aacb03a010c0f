"""Converts conversations to tokens and the model's tokens to messages."""
