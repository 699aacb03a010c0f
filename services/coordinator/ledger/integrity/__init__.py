"""Whether the ledger's SQLite file is what was written: checksums of rows, checks, reports."""
