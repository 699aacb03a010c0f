"""Tables of the ledger besides `groups`: one module each, with all its statements; changes need a transaction."""
