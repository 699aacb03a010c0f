"""One module for each kind of request to the exchange; `table.py` has all kinds."""
