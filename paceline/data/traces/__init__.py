"""Traces: recorded completions with rewards, their groups and pairs, and records of other systems as traces."""
