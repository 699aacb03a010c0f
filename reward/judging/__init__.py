"""Judges: language models that score completions, alone or in pairs."""
