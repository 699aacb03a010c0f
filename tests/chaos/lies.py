"""The lies of a rollout worker (liar.py tells them)."""

from __future__ import annotations

ABOUT_GROUPS = (
    "versions",
    "huge versions",
    "negative versions",
    "sessions",
    "session before the first",
    "lengths",
    "prompt",
    "no prompt",
    "vocabulary",
    "negative token",
    "probabilities",
    "not a number",
)
"""Lies about a group that was really leased and sampled."""

ABOUT_OTHERS = (
    "another's result",
    "another's return",
    "another's name",
    "no secret",
    "score",
    "receipt",
    "batch",
)
"""Lies in the name, or about the work, of others."""

LIES = (*ABOUT_GROUPS, *ABOUT_OTHERS, "silence")
