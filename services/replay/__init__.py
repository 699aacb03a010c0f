"""Replay: recorded steps trained once more, alone."""
