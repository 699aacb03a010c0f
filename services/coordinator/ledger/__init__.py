"""The ledger: the durable record of every group, in one SQLite file and its segments."""
