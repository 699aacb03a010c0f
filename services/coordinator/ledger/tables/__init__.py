"""Tables of the ledger beside `groups`: one module each, with every statement that the exchange runs on it."""
