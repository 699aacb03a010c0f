"""Registered models: their names, evidence, statement, signature and folder; see docs/registry.md."""
