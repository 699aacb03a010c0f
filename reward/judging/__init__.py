"""Scores completions with language models as judges, separately or in pairs."""
