"""Integrity of the ledger's SQLite file: checksums of rows, checks, reports."""
