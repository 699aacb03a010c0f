"""`paceline ledger verify`: compares a run's records with each other, and repairs them with `--repair`."""
