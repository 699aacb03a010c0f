"""Answers of RecordsService from a read-only ledger, each with bounded work."""
